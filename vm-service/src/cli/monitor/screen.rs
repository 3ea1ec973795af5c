//! What the screen shows: a panel for each GPU, as much of it as there is room for.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Sparkline};
use vm_passthrough::telemetry::{Clock, Source, Telemetry};

use super::history::History;
use super::panel::temperature;
use super::{Board, Panel, State};
use crate::api::GpuRates;
use crate::text::describe;
use crate::text::table::printable;

/// Rows of a panel without its border and its graphs.
const TEXT: u16 = 4;
/// The graphs of a panel.
const GRAPHS: u16 = 4;
/// Rows that a graph has at most.
const HIGHEST: u16 = 4;
/// Columns of what names a graph.
const LABEL: u16 = 13;

/// What the screen shows beside the board.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// The first panel that is shown.
    pub(crate) first: usize,
    /// How often the GPUs are read, in words.
    pub(crate) interval: String,
    /// Whether the host is a simulated one.
    pub(crate) is_simulated: bool,
}

/// Draws the board.
pub(crate) fn draw(frame: &mut Frame<'_>, board: &Board, view: &View) {
    let area = frame.area();
    if area.width == 0 || area.height == 0 {
        return;
    }
    // A panel in full, one without graphs, or a line.
    let panels = board.panels();
    let room = area.height.saturating_sub(1);
    let count = u16::try_from(panels.len()).unwrap_or(u16::MAX).max(1);
    let without = TEXT + 2;
    let height = match room / count {
        each if each >= without + GRAPHS => without + GRAPHS * ((each - without) / GRAPHS).min(HIGHEST),
        each if each >= without => without,
        _ => 1,
    };
    let shown = usize::from((room / height).max(1));
    let first = view.first.min(panels.len().saturating_sub(shown));
    let mut top = area.y;
    for panel in panels.iter().skip(first).take(shown) {
        let place = Rect::new(area.x, top, area.width, height).intersection(area);
        match height {
            1 => frame.render_widget(Paragraph::new(short(panel)), place),
            _ => full_panel(frame, panel, place),
        }
        top = top.saturating_add(height);
    }
    if room > 0 {
        let hidden = panels.len().saturating_sub(shown);
        let place = Rect::new(area.x, area.bottom().saturating_sub(1), area.width, 1);
        frame.render_widget(Paragraph::new(footer(view, panels.len(), hidden)), place);
    }
}

fn footer(view: &View, count: usize, hidden: usize) -> Line<'static> {
    let mut parts = vec!["q: quit".to_owned(), format!("every {}", view.interval)];
    if count == 0 {
        parts.push("no GPU is there".into());
    }
    if hidden > 0 {
        parts.push(format!("{hidden} more, up and down"));
    }
    if view.is_simulated {
        parts.push("simulated host".into());
    }
    Line::styled(format!(" {}", parts.join(" | ")), Style::new().add_modifier(Modifier::DIM))
}

/// A GPU in one line: what is wrong, or the numbers that matter most.
fn short(panel: &Panel) -> Line<'static> {
    let address = panel.gpu().address().to_string();
    if let Some(alarm) = panel.alarms().first() {
        return Line::from(vec![Span::raw(format!("{address} ")), Span::styled(alarm.clone(), alarming())]);
    }
    let numbers = panel.told().map(|told| {
        let parts = [
            temperature(told).map(|degrees| format!("{degrees:.0} °C")),
            told.power.map(|watts| format!("{watts:.0} W")),
            told.busy.map(|busy| format!("{busy} %")),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    });
    Line::raw(format!("{address} {}", numbers.unwrap_or_default()))
}

fn full_panel(frame: &mut Frame<'_>, panel: &Panel, place: Rect) {
    let gpu = panel.gpu();
    let enclosure = gpu.enclosure_text().map(|name| format!(" in {name}")).unwrap_or_default();
    let title = format!(" {} {}{enclosure}: {} ", gpu.address(), describe::holder(gpu), gpu.name());
    let alarms = panel.alarms();
    let border = if alarms.is_empty() { Style::new() } else { alarming() };
    // Names are of devices, and may hold what a terminal would obey.
    let block = Block::bordered().border_style(border).title(printable(&title));
    let inside = block.inner(place);
    frame.render_widget(block, place);
    let mut lines = match (panel.state(), panel.told()) {
        (State::Gone(_), _) | (_, None) => vec![Line::raw(""); 3],
        (_, Some(told)) => text(told, panel.rates()),
    };
    lines.push(Line::styled(alarms.join("; "), alarming()));
    frame.render_widget(Paragraph::new(lines), inside);
    let graphs =
        Rect { y: inside.y.saturating_add(TEXT), height: inside.height.saturating_sub(TEXT), ..inside };
    let told = panel.told();
    let limit = told.and_then(|told| told.power_limit).map_or(0, |watts| watts as u64);
    let all = told.and_then(|told| told.memory_total).unwrap_or(0);
    for (row, (name, history, most, colour)) in [
        ("busy", &panel.busy, 100, Color::Green),
        ("temperature", &panel.temperature, 100, Color::Yellow),
        ("power", &panel.power, limit, Color::Magenta),
        ("memory", &panel.memory, all, Color::Cyan),
    ]
    .into_iter()
    .enumerate()
    {
        let height = graphs.height / GRAPHS;
        let y = graphs.y.saturating_add(height.saturating_mul(u16::try_from(row).unwrap_or(0)));
        if height > 0 {
            graph(frame, Rect { y, height, ..graphs }, name, history, most, colour);
        }
    }
}

/// What a number was lately, up to `most` or the highest that it was.
fn graph(frame: &mut Frame<'_>, place: Rect, name: &str, history: &History, most: u64, colour: Color) {
    frame.render_widget(Paragraph::new(name.to_owned()), place);
    let x = place.x.saturating_add(LABEL);
    let place = Rect { x, width: place.right().saturating_sub(x), ..place };
    if place.width > 0 {
        let numbers: Vec<_> = history.last(place.width.into()).collect();
        let most = most.max(history.max()).max(1);
        frame.render_widget(
            Sparkline::default().data(numbers).max(most).style(Style::new().fg(colour)),
            place,
        );
    }
}

/// What it tells, in three lines.
fn text(told: &Telemetry, rates: GpuRates) -> Vec<Line<'static>> {
    if let Source::None(why) = &told.source {
        return vec![Line::raw(printable(why)), Line::raw(""), Line::raw(link(told, rates))];
    }
    let gibibytes = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let sides = [
        told.hot_spot.map(|degrees| format!("hot spot {degrees:.0}")),
        told.memory_temperature.map(|degrees| format!("memory {degrees:.0}")),
    ];
    let sides: Vec<_> = sides.into_iter().flatten().collect();
    let sides = if sides.is_empty() { String::new() } else { format!(" ({})", sides.join(", ")) };
    let first = [
        temperature(told).map(|degrees| format!("{degrees:.0} °C{sides}")),
        told.power.map(|watts| describe::of_limit(watts, told.power_limit, "W")),
        told.busy.map(|busy| format!("{busy} % busy")),
        told.memory_used
            .zip(told.memory_total)
            .map(|(used, all)| format!("{:.1} of {:.1} GiB", gibibytes(used), gibibytes(all))),
    ];
    let fan = match (told.fan_percent, told.fan_speed) {
        (Some(percent), Some(speed)) => Some(format!("fan {percent} %, {speed} a minute")),
        (Some(percent), None) => Some(format!("fan {percent} %")),
        (None, Some(speed)) => Some(format!("fan {speed} a minute")),
        (None, None) => None,
    };
    let throttle = told.throttle.as_ref().filter(|all| !all.is_empty()).map(|all| {
        let reasons: Vec<_> = all.iter().map(ToString::to_string).collect();
        format!("held down by {}", reasons.join(", "))
    });
    let second = [
        clock("core", told.core_clock),
        clock("memory", told.memory_clock),
        told.performance_state.as_ref().map(|state| format!("state {}", printable(state))),
        fan,
        throttle,
    ];
    let join =
        |parts: Vec<Option<String>>| Line::raw(parts.into_iter().flatten().collect::<Vec<_>>().join(", "));
    vec![join(first.into()), join(second.into()), Line::raw(link(told, rates))]
}

fn clock(name: &str, clock: Clock) -> Option<String> {
    let now = f64::from(clock.now?);
    Some(format!("{name} {}", describe::of_limit(now, clock.max.map(f64::from), "MHz")))
}

fn link(told: &Telemetry, rates: GpuRates) -> String {
    let link = told.link.map(|link| format!("link {}", describe::gpu_link(link)));
    let rate = |rate: Option<f64>| {
        rate.filter(|&rate| rate > 0.0).map_or_else(String::new, |rate| format!(" ({rate:.1}/s)"))
    };
    let errors = told.errors.as_ref().map(|errors| {
        format!(
            "errors {}{} correctable, {}{} nonfatal, {}{} fatal",
            errors.correctable.total,
            rate(rates.correctable),
            errors.nonfatal.total,
            rate(rates.nonfatal),
            errors.fatal.total,
            rate(rates.fatal)
        )
    });
    let replays = told.replays.map(|replays| format!("{replays}{} replays", rate(rates.replays)));
    [link, errors, replays].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn alarming() -> Style {
    Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
}
