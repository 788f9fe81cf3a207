//! How much load there is over time, as a multiple of what a scenario says: level, or between two levels.
//!
//! *Owns*: the multiple at each moment, and when so much of it has gone by. A core.
//! *Does not own*: what is sent (`source`).

/// Straight lines between points; before the first and behind the last it is level. Times in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Curve {
    /// By rising time; two of one time are a step.
    points: Vec<(f64, f64)>,
}

impl Curve {
    /// Always 1.
    pub(crate) fn level() -> Self {
        Self { points: vec![(0.0, 1.0)] }
    }

    /// From `at` on it goes, within this time, to so many times. Calls come by rising time.
    pub(crate) fn go(&mut self, at: f64, within: f64, times: f64) {
        let now = self.at(at);
        self.points.retain(|point| point.0 <= at);
        self.points.extend([(at, now), (at + within.max(0.0), times)]);
    }

    /// The multiple at this time.
    pub(crate) fn at(&self, time: f64) -> f64 {
        let after = self.points.partition_point(|point| point.0 <= time);
        let before = after.checked_sub(1).and_then(|at| self.points.get(at)).or(self.points.first());
        match (before, self.points.get(after)) {
            (Some(&(from, low)), Some(&(to, high))) if to > from && time > from => {
                low + (high - low) * (time - from) / (to - from)
            }
            (Some(&(_, level)), _) => level,
            (None, _) => 1.0,
        }
    }

    /// From `time` on, when so much (multiple × seconds) has gone by. None: never.
    pub(crate) fn after(&self, mut time: f64, mut amount: f64) -> Option<f64> {
        let next = self.points.partition_point(|point| point.0 <= time);
        for &(to, high) in &self.points[next..] {
            let (low, lasts) = (self.at(time), to - time);
            // At a step the multiple before it counts, which a point of the same time hides from `at`.
            let high = if lasts > 0.0 { self.before(to).unwrap_or(high) } else { high };
            let area = (low + high) / 2.0 * lasts;
            if area >= amount && area > 0.0 {
                return Some(time + root((high - low) / lasts, low, amount));
            }
            (time, amount) = (to, amount - area);
        }
        let level = self.at(time);
        (level > 0.0).then(|| time + amount / level)
    }

    /// The multiple just before a point's time.
    fn before(&self, time: f64) -> Option<f64> {
        self.points.iter().find(|point| point.0 == time).map(|point| point.1)
    }
}

/// The x at which `slope * x² / 2 + level * x` is `amount`; they are such that there is one.
fn root(slope: f64, level: f64, amount: f64) -> f64 {
    // The form that does not take the difference of two numbers that are nearly equal.
    let under = (level * level + 2.0 * slope * amount).max(0.0);
    2.0 * amount / (level + under.sqrt())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn curve(phases: &[(f64, f64, f64)]) -> Curve {
        let (mut curve, mut at) = (Curve::level(), 0.0);
        for (pause, within, times) in phases {
            at += pause;
            curve.go(at, *within, *times);
            at += within;
        }
        curve
    }

    #[test]
    fn a_surge_rises_and_falls() {
        let curve = curve(&[(10.0, 5.0, 4.0), (10.0, 0.0, 1.0)]);
        for (time, times) in
            [(0.0, 1.0), (10.0, 1.0), (12.5, 2.5), (15.0, 4.0), (24.9, 4.0), (25.0, 1.0), (99.0, 1.0)]
        {
            assert!((curve.at(time) - times).abs() < 1e-9, "at {time}: {}", curve.at(time));
        }
        assert_eq!(curve.after(0.0, 3.0), Some(3.0));
        assert_eq!(curve.after(16.0, 8.0), Some(18.0));
        assert_eq!(curve.after(24.0, 5.0), Some(26.0));
    }

    #[test]
    fn what_falls_to_nothing_never_comes() {
        let curve = curve(&[(10.0, 0.0, 0.0)]);
        assert_eq!(curve.after(0.0, 9.0), Some(9.0));
        assert_eq!(curve.after(0.0, 11.0), None);
        assert_eq!(curve.after(20.0, 0.5), None);
    }

    proptest! {
        #[test]
        fn what_goes_by_is_what_was_asked_for(
            phases in prop::collection::vec((0.0..20.0f64, prop_oneof![Just(0.0), 0.1..20.0f64], 0.0..50.0f64), 0..5),
            from in 0.0..60.0f64,
            amount in 0.01..200.0f64,
        ) {
            let curve = curve(&phases);
            if let Some(to) = curve.after(from, amount) {
                // Between two points it is a straight line, whose ends are looked at from within.
                let inner = curve.points.iter().map(|point| point.0).filter(|at| (from..to).contains(at));
                let ends: Vec<f64> = std::iter::once(from).chain(inner).chain([to]).collect();
                let area = |pair: &[f64]| {
                    let (width, inch) = (pair[1] - pair[0], (pair[1] - pair[0]) * 1e-9);
                    (curve.at(pair[0] + inch) + curve.at(pair[1] - inch)) / 2.0 * width
                };
                let sum: f64 = ends.windows(2).map(area).sum();
                prop_assert!((sum - amount).abs() < amount * 1e-4 + 1e-4, "{sum} instead of {amount}");
            }
        }
    }
}
