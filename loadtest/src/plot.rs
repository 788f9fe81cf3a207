//! Small plots for reports and README: figures over time, and bars, as SVG text.
//!
//! *Owns*: how a plot looks.
//! *Does not own*: what is in it, where it is kept.

use anyhow::{anyhow, ensure};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const WIDTH_PX: u32 = 800;
const HEIGHT_PX: u32 = 380;
/// Each bar of a bar plot has so much height.
const BAR_PX: u32 = 28;
/// A line of more points than it has pixels across is drawn from the least and greatest of each pixel's points.
const COLUMNS: usize = WIDTH_PX as usize;
/// Width of a letter of a name, near enough.
const LETTER_PX: i32 = 7;
/// Height of a row of the legend, and where it begins.
const LEGEND_PX: u32 = 18;
const LEGEND_LEFT_PX: i32 = 70;
/// About so many numbers stand at the y axis.
const TICKS: f64 = 8.0;
const FONT: &str = "sans-serif";
/// Colours that are told apart by people who see few (M. Okabe, K. Ito, 2008), those that are easiest to read first.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(90, 90, 90),
];
const GREY: RGBColor = RGBColor(110, 110, 110);

/// Figures over time, or over anything else that is a number.
#[derive(Debug, Clone, Default)]
pub struct TimePlot {
    /// Above the plot.
    pub title: String,
    /// What goes to the right, with its unit: `time, s`.
    pub x: String,
    /// What goes up, with its unit.
    pub y: String,
    /// The least that the upper end of the y axis stands for. The lower end is 0, or the least value below it.
    pub y_to: f64,
    /// The lines, in the order of the legend.
    pub lines: Vec<Line>,
    /// Moments to be named.
    pub marks: Vec<Mark>,
    /// Levels to be named: aims and limits.
    pub levels: Vec<Level>,
    /// Whether each step up is so many times as much, and not so much more: for latencies. What is not above 0 is left out.
    pub is_log: bool,
    /// What the x axis spans, where plots are to be compared; else what the points do.
    pub x_span: Option<(f64, f64)>,
}

/// One line of a plot. Points go from left to right; one that is not finite is left out.
#[derive(Debug, Clone, Default)]
pub struct Line {
    /// In the legend.
    pub name: String,
    /// x and y.
    pub points: Vec<(f64, f64)>,
    /// A value holds until the next point: for counts.
    pub is_stepped: bool,
}

/// A moment, drawn as an upright line.
#[derive(Debug, Clone, Default)]
pub struct Mark {
    /// Where on the x axis.
    pub x: f64,
    /// What happened.
    pub name: String,
}

/// A level, drawn as a dashed line across.
#[derive(Debug, Clone, Default)]
pub struct Level {
    /// Where on the y axis.
    pub y: f64,
    /// What it stands for.
    pub name: String,
}

/// One bar for each name, lying, so that names can be long.
#[derive(Debug, Clone, Default)]
pub struct BarPlot {
    /// Above the plot.
    pub title: String,
    /// What the bars stand for, with its unit.
    pub x: String,
    /// From above.
    pub bars: Vec<(String, f64)>,
    /// Levels to be named: aims and limits.
    pub levels: Vec<Level>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, Y>>;

/// The y axis, with its numbers at places that were chosen.
struct Ticked {
    range: RangedCoordf64,
    ticks: Vec<f64>,
}

impl Ranged for Ticked {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.range.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.range()
    }
}

impl TimePlot {
    /// The plot as SVG.
    ///
    /// # Errors
    /// For a plot without a point.
    pub fn to_svg(&self) -> anyhow::Result<String> {
        if self.is_log {
            return self.in_powers_of_ten().draw(&|power| number(10_f64.powf(*power)));
        }
        self.draw(&|value| number(*value))
    }

    /// The same with the logarithms of what goes up.
    fn in_powers_of_ten(&self) -> Self {
        let line = |line: &Line| Line {
            points: line.points.iter().map(|(x, y)| (*x, y.log10())).collect(),
            ..line.clone()
        };
        let level = |level: &Level| Level { y: level.y.log10(), ..level.clone() };
        Self {
            lines: self.lines.iter().map(line).collect(),
            levels: self.levels.iter().map(level).filter(|level| level.y.is_finite()).collect(),
            ..self.clone()
        }
    }

    fn draw(&self, y_number: &dyn Fn(&f64) -> String) -> anyhow::Result<String> {
        let all = || self.lines.iter().flat_map(|line| &line.points).filter(|point| is_finite(point));
        ensure!(all().next().is_some(), "{}: a plot without a point", self.title);
        let (left, right) = self.x_span.unwrap_or_else(|| span(all().map(|point| point.0)));
        let (low, high) = span(all().map(|point| point.1).chain(self.levels.iter().map(|level| level.y)));
        // A step of a logarithm above and below, so that a level line is not on the edge.
        let (low, high) = match self.is_log {
            true => (low.floor(), (high + 0.1).max(low.floor() + 1.0)),
            false => (low.min(0.0), high.max(self.y_to).max(low + f64::MIN_POSITIVE)),
        };
        let mut svg = String::new();
        {
            let whole = begin(&mut svg, HEIGHT_PX)?;
            let titled = whole.margin(6, 0, 0, 0).titled(&self.title, (FONT, 17)).map_err(drawn)?;
            let places = self.legend();
            let rows = places.last().map_or(0, |(row, _)| row + 1);
            let (legend, area) = titled.split_vertically(LEGEND_PX * rows);
            self.draw_legend(&legend, &places)?;
            let top = high + (high - low) * 0.06;
            let mut chart = ChartBuilder::on(&area)
                .margin(12)
                .margin_top(4)
                .x_label_area_size(38)
                .y_label_area_size(58)
                .build_cartesian_2d(
                    left..right.max(left + f64::MIN_POSITIVE),
                    Ticked { range: (low..top).into(), ticks: ticks(low, top, self.is_log) },
                )
                .map_err(drawn)?;
            let mesh = &mut chart.configure_mesh();
            mesh.x_desc(&self.x)
                .y_desc(&self.y)
                .bold_line_style(BLACK.mix(0.12))
                .light_line_style(TRANSPARENT);
            let number = |value: &f64| number(*value);
            mesh.x_label_formatter(&number).y_label_formatter(&y_number).axis_style(GREY);
            mesh.label_style((FONT, 12)).axis_desc_style((FONT, 13)).draw().map_err(drawn)?;
            self.draw_levels(&mut chart, (left, right))?;
            self.draw_marks(&mut chart, (low, high))?;
            self.draw_lines(&mut chart)?;
            whole.present().map_err(drawn)?;
        }
        Ok(svg)
    }

    /// Row and left end of each line's name: beside each other, in as many rows as they take.
    fn legend(&self) -> Vec<(u32, i32)> {
        let (mut row, mut left, mut places) = (0, LEGEND_LEFT_PX, Vec::new());
        if self.lines.iter().all(|line| line.name.is_empty()) {
            return places;
        }
        for line in &self.lines {
            let width = 44 + LETTER_PX * i32::try_from(line.name.chars().count()).unwrap_or(0);
            if left > LEGEND_LEFT_PX && left + width > WIDTH_PX as i32 {
                (row, left) = (row + 1, LEGEND_LEFT_PX);
            }
            places.push((row, left));
            left += width;
        }
        places
    }

    fn draw_levels(
        &self,
        chart: &mut Chart<'_, '_, Ticked>,
        (left, right): (f64, f64),
    ) -> anyhow::Result<()> {
        let style = (FONT, 12).into_font().color(&GREY).pos(Pos::new(HPos::Right, VPos::Bottom));
        for Level { y, name } in &self.levels {
            chart.draw_series([dashes([(left, *y), (right, *y)])]).map_err(drawn)?;
            let text = Text::new(name.clone(), (right, *y), style.clone());
            chart.draw_series([text]).map_err(drawn)?;
        }
        Ok(())
    }

    /// Names stand one below another where marks are near each other.
    fn draw_marks(&self, chart: &mut Chart<'_, '_, Ticked>, (low, high): (f64, f64)) -> anyhow::Result<()> {
        let style = (FONT, 12).into_font().color(&GREY).pos(Pos::new(HPos::Left, VPos::Top));
        let top = high + (high - low) * 0.06;
        for (at, Mark { x, name }) in self.marks.iter().enumerate() {
            chart.draw_series([dashes([(*x, low), (*x, top)])]).map_err(drawn)?;
            let y = top - (top - low) * 0.05 * (at % 3) as f64;
            let name = EmptyElement::at((*x, y)) + Text::new(name.clone(), (4, 2), style.clone());
            chart.draw_series([name]).map_err(drawn)?;
        }
        Ok(())
    }

    fn draw_lines(&self, chart: &mut Chart<'_, '_, Ticked>) -> anyhow::Result<()> {
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            chart.draw_series(LineSeries::new(line.path(), colour.stroke_width(2))).map_err(drawn)?;
        }
        Ok(())
    }

    /// In rows above the plot, where no line is hidden by it.
    fn draw_legend(&self, strip: &Area<'_>, places: &[(u32, i32)]) -> anyhow::Result<()> {
        let style = (FONT, 13).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
        for ((line, colour), (row, left)) in self.lines.iter().zip(COLOURS.iter().cycle()).zip(places) {
            let y = i32::try_from(row * LEGEND_PX)? + 8;
            let sample = PathElement::new([(*left, y), (left + 18, y)], colour.stroke_width(3));
            strip.draw(&sample).map_err(drawn)?;
            strip.draw(&Text::new(line.name.clone(), (left + 23, y), style.clone())).map_err(drawn)?;
        }
        Ok(())
    }
}

impl Line {
    /// What is drawn.
    fn path(&self) -> Vec<(f64, f64)> {
        let points: Vec<(f64, f64)> = self.points.iter().copied().filter(is_finite).collect();
        if !self.is_stepped {
            return thinned(points);
        }
        let corners =
            points.windows(2).map(|pair| (pair[1].0, pair[0].1)).zip(&points[points.len().min(1)..]);
        points.iter().copied().take(1).chain(corners.flat_map(|(corner, next)| [corner, *next])).collect()
    }
}

impl BarPlot {
    /// The plot as SVG.
    ///
    /// # Errors
    /// For a plot without a bar, or with one that is not finite.
    pub fn to_svg(&self) -> anyhow::Result<String> {
        let finite = self.bars.iter().all(|bar| bar.1.is_finite());
        ensure!(finite && !self.bars.is_empty(), "{}: a plot of bars that are none", self.title);
        let values = self.bars.iter().map(|bar| bar.1).chain(self.levels.iter().map(|level| level.y));
        let (low, high) = span(values.chain([0.0]));
        let count = self.bars.len();
        let longest = self.bars.iter().map(|bar| bar.0.chars().count()).max().unwrap_or_default();
        let mut svg = String::new();
        {
            let area = begin(&mut svg, 110 + BAR_PX * u32::try_from(count)?)?;
            let mut chart = ChartBuilder::on(&area)
                .caption(&self.title, (FONT, 17))
                .margin(12)
                .margin_right(48)
                .x_label_area_size(38)
                .y_label_area_size(16 + 7 * u32::try_from(longest.min(60))?)
                .build_cartesian_2d(low..high.max(low + f64::MIN_POSITIVE), 0.0..count as f64 + 0.5)
                .map_err(drawn)?;
            let mesh = &mut chart.configure_mesh();
            let number = |value: &f64| number(*value);
            mesh.disable_y_mesh().y_labels(0).x_desc(&self.x).x_label_formatter(&number).axis_style(GREY);
            mesh.bold_line_style(BLACK.mix(0.12)).light_line_style(TRANSPARENT);
            mesh.label_style((FONT, 12)).axis_desc_style((FONT, 13)).draw().map_err(drawn)?;
            self.draw_bars(&mut chart, (low, high))?;
            area.present().map_err(drawn)?;
        }
        Ok(svg)
    }

    fn draw_bars(
        &self,
        chart: &mut Chart<'_, '_, RangedCoordf64>,
        (low, _): (f64, f64),
    ) -> anyhow::Result<()> {
        let top = self.bars.len() as f64 + 0.5;
        let before = (FONT, 13).into_font().color(&BLACK).pos(Pos::new(HPos::Right, VPos::Center));
        let behind = (FONT, 12).into_font().color(&GREY).pos(Pos::new(HPos::Left, VPos::Center));
        for (at, (name, value)) in self.bars.iter().enumerate() {
            let middle = self.bars.len() as f64 - at as f64 - 0.5;
            let corners = [(0.0, middle - 0.36), (*value, middle + 0.36)];
            chart.draw_series([Rectangle::new(corners, COLOURS[0].filled())]).map_err(drawn)?;
            let name = EmptyElement::at((low, middle)) + Text::new(name.clone(), (-8, 0), before.clone());
            chart.draw_series([name]).map_err(drawn)?;
            let figure = EmptyElement::at((value.max(0.0), middle))
                + Text::new(number(*value), (5, 0), behind.clone());
            chart.draw_series([figure]).map_err(drawn)?;
        }
        let style = (FONT, 12).into_font().color(&GREY).pos(Pos::new(HPos::Left, VPos::Top));
        for Level { y, name } in &self.levels {
            chart.draw_series([dashes([(*y, 0.0), (*y, top)])]).map_err(drawn)?;
            let name = EmptyElement::at((*y, top)) + Text::new(name.clone(), (5, 1), style.clone());
            chart.draw_series([name]).map_err(drawn)?;
        }
        Ok(())
    }
}

fn begin(svg: &mut String, height_px: u32) -> anyhow::Result<Area<'_>> {
    let area = SVGBackend::with_string(svg, (WIDTH_PX, height_px)).into_drawing_area();
    area.fill(&WHITE).map_err(drawn)?;
    Ok(area)
}

fn dashes(path: [(f64, f64); 2]) -> DashedPathElement<std::array::IntoIter<(f64, f64), 2>, u32> {
    DashedPathElement::new(path, 5, 4, GREY.stroke_width(1))
}

/// The drawing errors borrow what they are about.
fn drawn(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw a plot: {error}")
}

fn is_finite(point: &(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}

fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
}

/// Where the y axis has its numbers: steps of 1, 2 or 5, of the powers of ten that a logarithmic axis is of too.
fn ticks(low: f64, high: f64, is_log: bool) -> Vec<f64> {
    if is_log {
        let between: &[f64] = if high - low > 4.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let powers = (low.floor() as i32..=high.ceil() as i32).map(f64::from);
        let all = powers.flat_map(|power| between.iter().map(move |digit| power + digit.log10()));
        return all.filter(|tick| (low - 1e-9..=high + 1e-9).contains(tick)).collect();
    }
    let rough = (high - low).max(f64::MIN_POSITIVE) / TICKS;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    (first..).take(2 * TICKS as usize).map(|nth| nth as f64 * step).take_while(|tick| *tick <= high).collect()
}

/// At most two points for each column of pixels, the least and the greatest, so that no peak is lost.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    if points.len() <= 2 * COLUMNS {
        return points;
    }
    let column = |points: &[(f64, f64)]| {
        let by_y = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let least = points.iter().min_by(by_y).copied();
        let greatest = points.iter().max_by(by_y).copied();
        let mut both: Vec<(f64, f64)> = least.into_iter().chain(greatest).collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        both
    };
    points.chunks(points.len().div_ceil(COLUMNS)).flat_map(column).collect()
}

/// Three digits that count, and no more zeros than it needs.
fn number(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        big if big >= 1e9 => (value / 1e9, "G"),
        big if big >= 1e6 => (value / 1e6, "M"),
        big if big >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let decimals = match scaled.abs() {
        big if big >= 100.0 => 0,
        big if big >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{scaled:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot() -> TimePlot {
        let wave = |shift: f64| {
            (0..600).map(|s| (f64::from(s), 1.0 + 0.3 * (f64::from(s) / 60.0 + shift).sin())).collect()
        };
        let line = |name: &str, shift| Line { name: name.to_owned(), points: wave(shift), is_stepped: false };
        let steps = Line {
            name: "pods".to_owned(),
            points: vec![(0.0, 0.2), (200.0, 0.4), (600.0, 0.1)],
            is_stepped: true,
        };
        TimePlot {
            title: "Load <of> \"pods\" & more".to_owned(),
            x: "time, s".to_owned(),
            y: "hottest pod, × mean".to_owned(),
            y_to: 1.5,
            lines: vec![line("one", 0.0), line("two", 1.0), steps],
            marks: vec![
                Mark { x: 300.0, name: "a pod dies".to_owned() },
                Mark { x: 330.0, name: "four join".to_owned() },
            ],
            levels: vec![Level { y: 1.25, name: "aim".to_owned() }],
            ..TimePlot::default()
        }
    }

    fn bars() -> BarPlot {
        BarPlot {
            title: "Bytes per file".to_owned(),
            x: "MB".to_owned(),
            bars: vec![
                ("bounded affinity".to_owned(), 8.4),
                ("two choices".to_owned(), 2.5),
                ("<random>".to_owned(), 2.45),
            ],
            levels: vec![Level { y: 7.5, name: "3 × two choices".to_owned() }],
        }
    }

    #[test]
    fn plots_hold_what_was_given() {
        for svg in [plot().to_svg().expect("a plot"), bars().to_svg().expect("a plot")] {
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
            assert!(
                !svg.contains("<of>") && !svg.contains("<random>") && !svg.contains("& "),
                "text is escaped"
            );
        }
        let svg = plot().to_svg().expect("a plot");
        for text in ["time, s", "hottest pod", "one", "two", "pods", "a pod dies", "four join", "aim"] {
            assert!(svg.contains(text), "no {text:?} in the plot");
        }
        assert_eq!(svg, plot().to_svg().expect("a plot"), "the same plot, the same text");
    }

    #[test]
    fn a_plot_of_nothing_is_an_error_and_one_point_is_none() {
        assert!(TimePlot::default().to_svg().is_err());
        assert!(BarPlot::default().to_svg().is_err());
        let of =
            |points: Vec<(f64, f64)>| TimePlot { lines: vec![Line { points, ..Line::default() }], ..plot() };
        assert!(of(vec![(1.0, f64::NAN)]).to_svg().is_err());
        assert!(of(vec![(1.0, 0.0)]).to_svg().is_ok());
        assert!(of(vec![(1.0, f64::NAN), (2.0, -3.0), (f64::INFINITY, 1.0)]).to_svg().is_ok());
    }

    #[test]
    fn latencies_from_a_tenth_to_ten_thousand_fit_on_one_axis() {
        let points = vec![(0.0, 0.2), (1.0, f64::NAN), (2.0, 0.0), (3.0, 9_000.0)];
        let line = Line { name: "p99".to_owned(), points, is_stepped: false };
        let svg = TimePlot { is_log: true, lines: vec![line], ..plot() }.to_svg().expect("a plot");
        for text in [">0.1<", ">10<", ">1k<"] {
            assert!(svg.replace(['\n', '\r'], "").contains(text), "no {text} in {svg}");
        }
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(0.0, 2.1, false), [0.0, 0.5, 1.0, 1.5, 2.0]);
        assert_eq!(ticks(0.0, 18_000.0, false).len(), 4);
        let powers =
            ticks(-1.0, 1.0, true).into_iter().map(|tick| number(10_f64.powf(tick))).collect::<Vec<_>>();
        assert_eq!(powers, ["0.1", "0.2", "0.5", "1", "2", "5", "10"]);
    }

    #[test]
    fn a_legend_of_many_names_has_rows() {
        let line =
            |n: usize| Line { name: format!("gateway-{n:09}"), points: vec![(0.0, 1.0)], is_stepped: false };
        let legend = TimePlot { lines: (0..12).map(line).collect(), ..TimePlot::default() }.legend();
        assert_eq!(legend.len(), 12);
        assert!(
            legend.iter().all(|(_, left)| *left < WIDTH_PX as i32 - 150) && legend[11].0 >= 2,
            "{legend:?}"
        );
    }

    #[test]
    fn a_long_line_keeps_its_peaks_in_few_points() {
        let mut points: Vec<(f64, f64)> = (0..1_000_000).map(|n| (f64::from(n), 1.0)).collect();
        points[567_890].1 = 50.0;
        points[123_456].1 = -50.0;
        let thin = thinned(points);
        assert!(thin.len() <= 2 * COLUMNS, "{}", thin.len());
        assert!(thin.contains(&(567_890.0, 50.0)) && thin.contains(&(123_456.0, -50.0)));
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
    }

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 0.25, 1.5, 12.345, 999.0, 5_000.0, 1_000_000.0, 25_300.0, -2.0].map(number);
        assert_eq!(texts, ["0", "0.25", "1.5", "12.3", "999", "5k", "1M", "25.3k", "-2"]);
    }
}
