//! What the demand will be when a pod that is started now takes its share: by its trend, and by the same minute of
//! earlier days and weeks.
//!
//! A forecast is used while it does better than saying that everything stays as it is ("last value"). Both are judged by
//! pinball loss at the 90th percentile: too low costs nine times what too high does, as it does for a pool.
//!
//! *Owns*: both forecasts, their scores, a fortnight of minutes.
//! *Does not own*: how many pods that means (`policy`).

use std::collections::VecDeque;
use std::time::Duration;

use super::history::{Tick, ms};

const MINUTE_MS: u64 = 60_000;
const DAY: u64 = 24 * 60;
const WEEK: u64 = 7 * DAY;
/// Minutes that are kept: two weeks, and an hour for looking ahead.
const MINUTES_MAX: usize = 2 * WEEK as usize + 60;
/// Same minute of as many earlier days, until a week is known.
const DAYS: u64 = 3;
const WEEKS: u64 = 2;

/// Over what the trend is measured: a steep one is seen within the shorter time, a slow one stands out from the noise
/// within the longer one alone.
const TRENDS: [Duration; 2] = [Duration::from_secs(120), Duration::from_secs(300)];
/// How much of the variance a line has to explain. A step explains at most three quarters: it is not a trend.
const FIT_MIN: f64 = 0.8;

const QUANTILE: f64 = 0.9;
/// Minutes of comparison before the season is believed.
const SEASON_SCORED_MIN: u32 = 60;
/// Minutes of comparison before the trend may be given up; its own losses have to be larger by a tenth.
const TREND_SCORED_MIN: u32 = 10;
/// Minutes after which a score counts for less by a factor of e.
const SEASON_MEMORY: f64 = DAY as f64;
const TREND_MEMORY: f64 = 360.0;
/// Ahead of what the scores judge.
const SCORED_AHEAD: u64 = 1;

/// Losses of a forecast beside those of "last value", older ones fading.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    /// Mean pinball loss of the forecast, in pods' worth of load.
    pub loss: f64,
    /// The same of "last value".
    pub last_value_loss: f64,
    /// Minutes that were compared.
    pub minutes: u32,
}

impl Score {
    fn add(&mut self, forecast: f64, last_value: f64, actual: f64, memory: f64) {
        // The first minutes count equally: a mean that starts at nothing would be too low.
        let weight = (1.0 / f64::from(self.minutes + 1)).max(1.0 / memory);
        self.loss += weight * (pinball(forecast, actual) - self.loss);
        self.last_value_loss += weight * (pinball(last_value, actual) - self.last_value_loss);
        self.minutes = self.minutes.saturating_add(1);
    }
}

fn pinball(forecast: f64, actual: f64) -> f64 {
    let missed = actual - forecast;
    if missed >= 0.0 { QUANTILE * missed } else { (QUANTILE - 1.0) * missed }
}

/// Minutes, and how well each forecast did on them.
#[derive(Debug, Clone, Default)]
pub struct Forecasts {
    /// The largest demand of each minute; NaN where nobody looked.
    minutes: VecDeque<f32>,
    first_minute: u64,
    open: Option<(u64, f64)>,
    /// What the trend said at the end of each minute of the one after, with that minute's number.
    trend_said: Option<(u64, f64)>,
    extra: f64,
    trend: Score,
    season: Score,
}

impl Forecasts {
    pub(super) fn observe(&mut self, now_ms: u64, demand: f64, extra: f64) {
        let minute = now_ms / MINUTE_MS;
        match self.open {
            Some((open, most)) if open == minute => self.open = Some((open, most.max(demand))),
            Some((open, most)) => {
                self.close(open, most);
                self.skip_to(minute);
                self.open = Some((minute, demand));
            }
            None => {
                self.first_minute = minute;
                self.open = Some((minute, demand));
            }
        }
        self.extra = extra;
    }

    fn close(&mut self, minute: u64, most: f64) {
        if let Some(last) = self.at(minute.wrapping_sub(SCORED_AHEAD)) {
            if let Some((_, said)) = self.trend_said.filter(|(of, _)| *of == minute) {
                self.trend.add(said, last, most, TREND_MEMORY);
            }
            if let Some(said) = self.earlier(minute) {
                self.season.add(said, last, most, SEASON_MEMORY);
            }
        }
        self.trend_said = Some((minute + SCORED_AHEAD, most + self.extra));
        self.push(most as f32);
    }

    fn push(&mut self, most: f32) {
        self.minutes.push_back(most);
        if self.minutes.len() > MINUTES_MAX {
            self.minutes.pop_front();
            self.first_minute += 1;
        }
    }

    fn skip_to(&mut self, minute: u64) {
        let next = self.first_minute + self.minutes.len() as u64;
        if minute.saturating_sub(next) > MINUTES_MAX as u64 {
            self.minutes.clear();
            self.first_minute = minute;
            return;
        }
        (next..minute).for_each(|_| self.push(f32::NAN));
    }

    fn at(&self, minute: u64) -> Option<f64> {
        let index = usize::try_from(minute.checked_sub(self.first_minute)?).ok()?;
        self.minutes.get(index).map(|most| f64::from(*most)).filter(|most| !most.is_nan())
    }

    /// The same minute of the weeks before, or of the days before while no week is known.
    fn earlier(&self, minute: u64) -> Option<f64> {
        let most = |step: u64, steps: u64| {
            let before = (1..=steps).filter_map(|n| self.at(minute.checked_sub(n * step)?));
            before.reduce(f64::max)
        };
        most(WEEK, WEEKS).or_else(|| most(DAY, DAYS))
    }

    /// What the trend adds to the demand within a minute, if it is believed: 0 where there is none.
    pub(super) fn trend_per_minute(&self) -> f64 {
        let loses =
            self.trend.minutes >= TREND_SCORED_MIN && self.trend.loss > 1.1 * self.trend.last_value_loss;
        if loses { 0.0 } else { self.extra }
    }

    /// The most that the season expects from now to the end of the horizon, if it is believed.
    pub(super) fn season(&self, now_ms: u64, horizon: Duration) -> Option<f64> {
        let wins = self.season.minutes >= SEASON_SCORED_MIN && self.season.loss < self.season.last_value_loss;
        let (from, to) = (now_ms / MINUTE_MS, (now_ms + ms(horizon)).div_ceil(MINUTE_MS));
        let expected = (from..=to).filter_map(|minute| self.earlier(minute));
        expected.reduce(f64::max).filter(|_| wins)
    }

    /// How the trend has done.
    pub fn trend_score(&self) -> Score {
        self.trend
    }

    /// How the season has done.
    pub fn season_score(&self) -> Score {
        self.season
    }
}

/// What the demand gains in a minute if it goes on as in the last minutes; 0 where they are no rising line.
pub(super) fn trend(recent: &VecDeque<Tick>, now_ms: u64) -> f64 {
    TRENDS.iter().map(|window| line(recent, now_ms, *window)).fold(0.0, f64::max)
}

/// The slope of the least squares through a window, per minute.
fn line(recent: &VecDeque<Tick>, now_ms: u64, window: Duration) -> f64 {
    let from = now_ms.saturating_sub(ms(window));
    let (mut n, mut x, mut y, mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
    let mut oldest = now_ms;
    for tick in recent.iter().rev().take_while(|tick| tick.at_ms >= from) {
        oldest = tick.at_ms;
        let at = (now_ms - tick.at_ms) as f64 / -(MINUTE_MS as f64);
        n += 1.0;
        x += at;
        y += tick.demand;
        xx += at * at;
        xy += at * tick.demand;
        yy += tick.demand * tick.demand;
    }
    // Half a window is no window: what is there may be a step.
    if now_ms - oldest < ms(window) * 9 / 10 {
        return 0.0;
    }
    let (of_x, of_y, of_xy) = (n * xx - x * x, n * yy - y * y, n * xy - x * y);
    let is_flat = of_x <= 0.0 || of_y <= 1e-9 * n * yy;
    if is_flat || of_xy <= 0.0 || of_xy * of_xy < FIT_MIN * of_x * of_y { 0.0 } else { of_xy / of_x }
}
