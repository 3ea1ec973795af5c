//! Draws histories: above the addresses over time, below the bytes over time.

use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use plotters::coord::Shift;
use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::{
    Color as _, DrawingArea, DrawingBackend, FontStyle, IntoFont as _, PathElement, Polygon, RGBColor,
    Rectangle, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{TextStyle, register_font};

use super::history::History;
use super::layout::Layout;
use crate::memory::{Block, Sums};
use crate::units;

const HEIGHT: i32 = 1000;
/// Where things are in a panel.
const LEFT: i32 = 132;
const RIGHT: i32 = 64;
const MARKS: Range<i32> = 92..136;
const ADDRESSES: Range<i32> = 140..640;
const BYTES: Range<i32> = 704..900;
const LEGEND: [i32; 2] = [952, 978];

/// Colours that those who can't tell red from green can tell apart, too (Okabe and Ito's).
const INK: RGBColor = RGBColor(40, 40, 40);
const GREY: RGBColor = RGBColor(120, 120, 120);
const FAINT: RGBColor = RGBColor(228, 228, 228);
const GAP: RGBColor = RGBColor(246, 246, 246);
const FAILED: RGBColor = RGBColor(214, 39, 40);
const NATIVE: RGBColor = RGBColor(230, 159, 0);
const HOST: RGBColor = RGBColor(110, 110, 110);
const MAPPED: RGBColor = RGBColor(0, 114, 178);
const FAMILIES: [RGBColor; 5] = [
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
];

/// How many allocations are drawn one by one; more are drawn as pixels.
const MOST_BLOCKS: usize = 20_000;
/// How many pixels those fill.
const MOST_PIXELS: u64 = 4 << 30;
/// How many pauses are shown.
const MOST_PAUSES: usize = 100;
/// How many moves have an arrow.
const MOST_ARROWS: usize = 2_000;

type Result<T, DB> = std::result::Result<T, DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

/// The size of a picture of so many histories.
pub(super) fn size(histories: usize) -> (u32, u32) {
    (if histories > 1 { 2100 } else { 1400 }, HEIGHT as u32)
}

/// Loads the font, which is this program's own: a machine may have none.
///
/// # Errors
/// When it is none.
pub(super) fn fonts() -> std::result::Result<(), &'static str> {
    static DONE: OnceLock<bool> = OnceLock::new();
    let load = || register_font("sans-serif", FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).is_ok();
    if *DONE.get_or_init(load) { Ok(()) } else { Err("the font is none") }
}

/// What all panels have in common.
struct Scales {
    /// Microseconds that an axis of times has.
    time: u64,
    /// Units of a layout.
    height: f64,
    /// Bytes that are taken.
    bytes: u64,
}

/// Draws histories beside each other, on an area that has so many pixels on each side for one of the picture's.
///
/// # Errors
/// The backend's.
pub(super) fn draw<DB: DrawingBackend>(
    root: &DrawingArea<DB, Shift>,
    scale: i32,
    histories: &[History],
) -> Result<(), DB> {
    root.fill(&WHITE)?;
    let layouts: Vec<Layout> = histories
        .iter()
        .map(|of| {
            let places = |block: &Block| block.id.address().map(|start| (start, start + block.bytes));
            Layout::of(of.blocks.iter().filter_map(places).collect())
        })
        .collect();
    let most = |of: &History| {
        let most =
            of.sums.iter().map(|(_, sums)| sums.taken().saturating_add(sums.missing)).max().unwrap_or(0);
        // What failed is shown as far as it fits without making the rest small.
        let asked = of.failures.iter().map(|of| of.taken.saturating_add(of.bytes));
        asked.filter(|asked| *asked / 2 <= most).max().unwrap_or(0).max(most)
    };
    let scales = Scales {
        time: histories.iter().map(|of| of.length).max().unwrap_or(0).max(1),
        height: layouts.iter().map(|of| of.height).fold(1.0, f64::max),
        bytes: histories.iter().map(most).max().map_or(0, |most| most.saturating_add(most / 20)).max(1),
    };
    let title = match histories.len() {
        1 => "Device memory over time",
        _ => "Device memory over time, both on the same scales",
    };
    let canvas = Canvas { area: root, scale };
    canvas.text((24, 18), title, 26, &INK, (HPos::Left, VPos::Top))?;
    let panels = root.split_evenly((1, histories.len().max(1)));
    for ((panel, history), layout) in panels.iter().zip(histories).zip(&layouts) {
        let (width, _) = panel.dim_in_pixel();
        Panel {
            canvas: Canvas { area: panel, scale },
            history,
            layout,
            scales: &scales,
            right: width as i32 / scale - RIGHT,
        }
        .draw()?;
    }
    legend(&canvas, histories)?;
    root.present()
}

/// A part of the picture, in pixels.
struct Canvas<'a, DB: DrawingBackend> {
    area: &'a DrawingArea<DB, Shift>,
    /// How many of the area's pixels one of the picture has on each side.
    scale: i32,
}

impl<DB: DrawingBackend> Canvas<'_, DB> {
    fn scaled(&self, (x, y): (i32, i32)) -> (i32, i32) {
        (x * self.scale, y * self.scale)
    }

    /// Fills what lies in ranges.
    fn rect(&self, x: Range<i32>, y: Range<i32>, color: RGBColor) -> Result<(), DB> {
        let corners = [(x.start, y.start), (x.end, y.end)].map(|at| self.scaled(at));
        self.area.draw(&Rectangle::new(corners, color.filled()))
    }

    fn line(&self, points: &[(i32, i32)], color: RGBColor) -> Result<(), DB> {
        let points: Vec<_> = points.iter().map(|at| self.scaled(*at)).collect();
        self.area.draw(&PathElement::new(points, color.stroke_width(self.scale as u32)))
    }

    fn style<'c>(&self, size: i32, color: &'c RGBColor, (h_pos, v_pos): (HPos, VPos)) -> TextStyle<'c> {
        let font = ("sans-serif", size * self.scale).into_font();
        TextStyle::from(font).color(color).pos(Pos::new(h_pos, v_pos))
    }

    fn text(
        &self,
        at: (i32, i32),
        text: &str,
        size: i32,
        color: &RGBColor,
        anchor: (HPos, VPos),
    ) -> Result<(), DB> {
        self.area.draw_text(text, &self.style(size, color, anchor), self.scaled(at))
    }

    /// How wide a text is.
    fn width(&self, text: &str, size: i32) -> Result<i32, DB> {
        let style = self.style(size, &INK, (HPos::Left, VPos::Top));
        Ok(self.area.estimate_text_size(text, &style)?.0 as i32 / self.scale)
    }

    /// A cross.
    fn cross(&self, (x, y): (i32, i32)) -> Result<(), DB> {
        for at in [0, 1] {
            self.line(&[(x - 4 + at, y - 4), (x + 4 + at, y + 4)], FAILED)?;
            self.line(&[(x - 4 + at, y + 4), (x + 4 + at, y - 4)], FAILED)?;
        }
        Ok(())
    }

    /// White stripes over what is there.
    fn stripes(&self, x: Range<i32>, y: Range<i32>) -> Result<(), DB> {
        y.step_by(4).try_for_each(|y| self.rect(x.clone(), y..y + 2, WHITE))
    }

    /// An arrow down or up.
    fn arrow(&self, x: i32, from: i32, to: i32) -> Result<(), DB> {
        let back = if to > from { -8 } else { 8 };
        self.rect(x - 1..x + 1, from.min(to + back)..from.max(to + back), INK)?;
        self.rect(x - 3..x + 3, from - 3..from + 3, INK)?;
        let head = [(x, to), (x - 5, to + back), (x + 5, to + back)].map(|at| self.scaled(at));
        self.area.draw(&Polygon::new(head.to_vec(), INK.filled()))
    }
}

/// A colour's light form, for what has no memory.
fn light(RGBColor(r, g, b): RGBColor) -> RGBColor {
    let mix = |of: u8| (255 - (255 - u16::from(of)) / 4) as u8;
    RGBColor(mix(r), mix(g), mix(b))
}

/// A colour of a block that has memory.
fn solid(block: &Block) -> RGBColor {
    match block {
        Block { native: Some(_), .. } => NATIVE,
        Block { of_host: true, .. } => HOST,
        Block { family: 0, .. } => MAPPED,
        Block { family, .. } => FAMILIES[(family - 1) % FAMILIES.len()],
    }
}

/// What of the addresses is too small to be drawn one by one: a colour for each pixel.
struct Pixels {
    x: Range<i32>,
    y: Range<i32>,
    colors: Vec<Option<RGBColor>>,
    /// How many may still be filled: allocations that lie over each other, as only a log that means ill has them, would take for ever.
    budget: u64,
}

impl Pixels {
    fn new(x: Range<i32>, y: Range<i32>) -> Self {
        let colors = vec![None; x.len() * y.len()];
        Self { x, y, colors, budget: MOST_PIXELS }
    }

    fn fill(&mut self, x: Range<i32>, y: Range<i32>, color: RGBColor) {
        let x = x.start.max(self.x.start) - self.x.start..x.end.min(self.x.end) - self.x.start;
        for y in y.start.max(self.y.start)..y.end.min(self.y.end) {
            let Some(budget) = self.budget.checked_sub(x.len() as u64 + 1) else { return };
            self.budget = budget;
            let row = (y - self.y.start) as usize * self.x.len();
            if let Some(row) = self.colors.get_mut(row + x.start as usize..row + x.end.max(x.start) as usize)
            {
                row.fill(Some(color));
            }
        }
    }

    /// Draws them, by runs of a colour.
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Result<(), DB> {
        for (y, row) in self.y.clone().zip(self.colors.chunks_exact(self.x.len().max(1))) {
            let mut x = self.x.start;
            for run in row.chunk_by(|a, b| a == b) {
                let end = x + run.len() as i32;
                if let Some(color) = run[0] {
                    canvas.rect(x..end, y..y + 1, color)?;
                }
                x = end;
            }
        }
        Ok(())
    }
}

/// What is drawn of one history.
struct Panel<'a, DB: DrawingBackend> {
    canvas: Canvas<'a, DB>,
    history: &'a History,
    layout: &'a Layout,
    scales: &'a Scales,
    /// Where its axis of times ends.
    right: i32,
}

impl<DB: DrawingBackend> Panel<'_, DB> {
    fn draw(&self) -> Result<(), DB> {
        self.heading()?;
        self.frames()?;
        self.addresses()?;
        self.arrows()?;
        self.pauses()?;
        self.failures()?;
        self.bytes()
    }

    /// Where a time is.
    fn x(&self, time: u64) -> i32 {
        let share = time as f64 / self.scales.time as f64;
        LEFT + (share.min(1.0) * f64::from(self.right - LEFT)) as i32
    }

    /// Where a place of the layout is.
    fn high(&self, units: f64) -> i32 {
        ADDRESSES.end - (units / self.scales.height * f64::from(ADDRESSES.end - ADDRESSES.start)) as i32
    }

    /// Where so many bytes are.
    fn level(&self, bytes: u64) -> i32 {
        let share = (bytes as f64 / self.scales.bytes as f64).min(1.0);
        BYTES.end - (share * f64::from(BYTES.end - BYTES.start)) as i32
    }

    fn heading(&self) -> Result<(), DB> {
        let History { process, counts, peak, length, .. } = self.history;
        let name = process.program.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or("a program");
        let mode = match &*process.mode {
            "" => String::new(),
            "MONITOR" => " with the driver's memory (MONITOR)".into(),
            mode => format!(" with the hook's ({})", units::printable(mode, 20)),
        };
        self.canvas.text(
            (LEFT, 56),
            &format!("{}{mode}", units::printable(name, 40)),
            19,
            &INK,
            (HPos::Left, VPos::Top),
        )?;
        let mut parts = vec![
            format!("process {}", process.pid),
            units::time(Duration::from_micros(*length)),
            format!("allocations: {}", counts.allocated),
            format!("at most {}", units::bytes(*peak)),
        ];
        if counts.moved != 0 {
            parts.push(format!("moves: {}, {}", counts.moved, units::bytes(counts.moved_bytes)));
        }
        if counts.failed != 0 {
            parts.push(format!("failures: {}", counts.failed));
        }
        self.canvas.text((LEFT, 78), &parts.join("  ·  "), 15, &GREY, (HPos::Left, VPos::Top))
    }

    /// What lies behind: gaps of the addresses, lines of the axes, and their texts.
    fn frames(&self) -> Result<(), DB> {
        let across = LEFT..self.right;
        let extents = &self.layout.extents;
        for pair in extents.windows(2) {
            let gap = self.high(pair[1].low)..self.high(pair[0].high);
            if gap.len() > 1 {
                self.canvas.rect(across.clone(), gap, GAP)?;
            }
        }
        let step = units::time_step(self.scales.time, 6);
        for time in (0..=self.scales.time).step_by(step as usize) {
            let x = self.x(time);
            for y in [&ADDRESSES, &BYTES] {
                self.canvas.line(&[(x, y.start), (x, y.end)], FAINT)?;
            }
            let text = units::time(Duration::from_micros(time));
            let text = if time == 0 { "0" } else { &text };
            self.canvas.text((x, BYTES.end + 8), text, 14, &GREY, (HPos::Center, VPos::Top))?;
        }
        let step = units::byte_step(self.scales.bytes, 5);
        for bytes in (0..=self.scales.bytes).step_by(step as usize) {
            let y = self.level(bytes);
            self.canvas.line(&[(LEFT, y), (self.right, y)], FAINT)?;
            self.canvas.text((LEFT - 8, y), &units::bytes(bytes), 14, &GREY, (HPos::Right, VPos::Center))?;
        }
        // The beginnings of what lies together, as many as there is room for.
        let mut free = i32::MAX;
        for extent in extents {
            let y = self.high(extent.low);
            if y <= free {
                let text = format!("{:#x}", extent.start);
                self.canvas.text((LEFT - 8, y), &text, 13, &GREY, (HPos::Right, VPos::Bottom))?;
                self.canvas.line(&[(LEFT - 5, y), (LEFT, y)], GREY)?;
                free = y - 15;
            }
        }
        for y in [&ADDRESSES, &BYTES] {
            self.canvas.line(&[(LEFT, y.start), (LEFT, y.end), (self.right, y.end)], GREY)?;
        }
        let small = |at, text: &str| self.canvas.text(at, text, 14, &GREY, (HPos::Left, VPos::Bottom));
        small((LEFT, BYTES.start - 8), "memory that is taken, of the driver's own and mapped")?;
        self.canvas.text(
            (self.right, BYTES.end + 28),
            "time since the first event",
            14,
            &GREY,
            (HPos::Right, VPos::Top),
        )?;
        if extents.is_empty() {
            return small((LEFT + 12, ADDRESSES.start + 30), "nothing was allocated");
        }
        // How many bytes a height is.
        let bytes = units::byte_step(self.scales.height as u64, 12);
        let (x, top) = (self.right + 10, ADDRESSES.end - (ADDRESSES.end - self.high(bytes as f64)));
        self.canvas.line(&[(x, top), (x + 6, top), (x + 6, ADDRESSES.end), (x, ADDRESSES.end)], GREY)?;
        self.canvas.text((x - 2, top - 4), &units::bytes(bytes), 13, &GREY, (HPos::Left, VPos::Bottom))?;
        small((LEFT, ADDRESSES.end + 18), "addresses; gaps are shortened, and what is small is drawn larger")
    }

    /// When and where a block is: all of it, and the part of which memory came later, until that came.
    fn places(&self, block: &Block) -> (Range<i32>, Range<i32>, Range<i32>, Range<i32>) {
        let (start, end) = (self.x(block.since), self.x(block.until.unwrap_or(self.history.length)));
        let x = start..end.max(start + 1);
        let start = block.id.number();
        let (top, bottom) =
            (self.high(self.layout.at(start + block.bytes)), self.high(self.layout.at(start)));
        let y = top.min(bottom - 1)..bottom;
        // Until it is filled, or for ever.
        let filled = block.filled.map_or(x.end, |time| self.x(time));
        let part = self.high(self.layout.at(start + block.missing.min(block.bytes)))..bottom;
        let light_x = x.start..if block.missing == 0 { x.start } else { filled };
        (x, y, light_x, part)
    }

    fn addresses(&self) -> Result<(), DB> {
        let mut pixels = Pixels::new(LEFT..self.right, ADDRESSES);
        let (mut large, mut labels) = (Vec::new(), Vec::new());
        // What has no address takes memory alone.
        for block in self.history.blocks.iter().filter(|block| block.id.address().is_some()) {
            let (x, y, light_x, part) = self.places(block);
            let color = solid(block);
            if x.len() < 4 || y.len() < 4 || large.len() >= MOST_BLOCKS {
                pixels.fill(x.clone(), y, color);
                pixels.fill(light_x, part, light(color));
            } else {
                large.push((x, y, light_x, part, color, block));
            }
        }
        for (x, y, light_x, part, color, block) in large {
            self.canvas.rect(x.clone(), y.clone(), color)?;
            if !light_x.is_empty() && !part.is_empty() {
                self.canvas.rect(light_x, part, light(color))?;
            }
            let (right, bottom) = (x.end - 1, y.end - 1);
            let corners = [
                (x.start, y.start),
                (right, y.start),
                (right, bottom),
                (x.start, bottom),
                (x.start, y.start),
            ];
            self.canvas.line(&corners, WHITE)?;
            if y.len() >= 18 && x.len() >= 56 {
                labels.push((x, y, block));
            }
        }
        pixels.draw(&self.canvas)?;
        for (x, y, block) in labels {
            let text = units::bytes(block.bytes);
            if self.canvas.width(&text, 14)? + 12 <= x.len() as i32 {
                let at = (x.end - 6, (y.start + y.end) / 2);
                self.canvas.text(at, &text, 14, &WHITE, (HPos::Right, VPos::Center))?;
            }
        }
        Ok(())
    }

    /// From where memory was to where it is.
    fn arrows(&self) -> Result<(), DB> {
        let middle = |address: u64, bytes: u64| self.high(self.layout.at(address.saturating_add(bytes / 2)));
        let moves = self.history.blocks.iter().filter_map(|block| block.moved.map(|moved| (block, moved)));
        let mut places: Vec<_> = moves
            .map(|(block, of)| {
                (self.x(of.time), middle(of.from, of.bytes), middle(block.id.number(), of.bytes))
            })
            .collect();
        places.sort_unstable();
        places.dedup();
        places.iter().take(MOST_ARROWS).try_for_each(|(x, from, to)| self.canvas.arrow(*x, *from, *to))
    }

    /// Stripes over the time of a pause, with what was given back where there is room.
    fn pauses(&self) -> Result<(), DB> {
        for pause in self.history.pauses.iter().take(MOST_PAUSES) {
            let x = self.x(pause.start)..self.x(pause.end);
            self.canvas.stripes(x.clone(), ADDRESSES)?;
            let text = format!("paused: {} given back", units::bytes(pause.bytes));
            let width = self.canvas.width(&text, 14)?;
            if width + 12 <= x.len() as i32 {
                let (at, y) = ((x.start + x.end) / 2, ADDRESSES.start + 12);
                self.canvas.rect(at - width / 2 - 4..at + width / 2 + 4, y - 10..y + 10, WHITE)?;
                self.canvas.text((at, y), &text, 14, &INK, (HPos::Center, VPos::Center))?;
            }
        }
        Ok(())
    }

    /// Crosses above, with what was asked for where there is room.
    fn failures(&self) -> Result<(), DB> {
        // How far to the right each of two rows of texts is taken.
        let (mut free, mut untold, mut last) = ([LEFT - 30; 2], 0, None);
        for failure in &self.history.failures {
            let x = self.x(failure.time);
            if last != Some(x) {
                self.canvas.cross((x, ADDRESSES.start - 8))?;
                self.canvas.line(&[(x, ADDRESSES.start), (x, ADDRESSES.end)], light(FAILED))?;
                let asked = failure.taken.saturating_add(failure.bytes);
                self.canvas.rect(x - 1..x + 1, self.level(asked)..self.level(failure.taken), FAILED)?;
            }
            // Where no row has room, nothing is measured.
            if last.replace(x) == Some(x) || free.iter().all(|free| *free > x) {
                untold += 1;
                continue;
            }
            let text = units::bytes(failure.bytes);
            let width = self.canvas.width(&text, 14)?;
            let start = (x - width / 2).clamp(LEFT, (self.right - width).max(LEFT));
            match free.iter().position(|free| start > free + 8) {
                Some(row) => {
                    let y = MARKS.end - 14 - 15 * row as i32;
                    self.canvas.text((start, y), &text, 14, &FAILED, (HPos::Left, VPos::Bottom))?;
                    free[row] = start + width;
                }
                None => untold += 1,
            }
        }
        if untold != 0 {
            let at = (LEFT - 12, MARKS.end - 14);
            self.canvas.text(at, &format!("and {untold} more"), 14, &FAILED, (HPos::Right, VPos::Bottom))?;
        }
        Ok(())
    }

    /// The bytes over time: of each pixel's times the one when the process had the most.
    fn bytes(&self) -> Result<(), DB> {
        let all = |sums: &Sums| sums.taken().saturating_add(sums.missing);
        let (mut at, mut now) = (0, Sums::default());
        let mut columns: Vec<(i32, Sums)> = Vec::new();
        let end = self.x(self.history.length);
        for x in LEFT..=end.min(self.right - 1) {
            let mut most = now;
            while let Some((_, sums)) = self.history.sums.get(at).filter(|(time, _)| self.x(*time) <= x) {
                (at, now) = (at + 1, *sums);
                most = if all(sums) >= all(&most) { *sums } else { most };
            }
            columns.push((x, most));
        }
        for run in columns.chunk_by(|(_, a), (_, b)| a == b) {
            let (Some((first, sums)), Some((last, _))) = (run.first(), run.last()) else { continue };
            let mut bottom = BYTES.end;
            let mut sum = 0u64;
            for (bytes, color) in
                [(sums.native, NATIVE), (sums.there(), MAPPED), (sums.missing, light(MAPPED))]
            {
                sum = sum.saturating_add(bytes);
                let top = self.level(sum);
                if top < bottom {
                    self.canvas.rect(*first..last + 1, top..bottom, color)?;
                }
                bottom = top;
            }
        }
        Ok(())
    }
}

/// What the colours are, of those that occur.
fn legend<DB: DrawingBackend>(canvas: &Canvas<'_, DB>, histories: &[History]) -> Result<(), DB> {
    let any = |is: &dyn Fn(&Block) -> bool| histories.iter().any(|of| of.blocks.iter().any(is));
    let (mut x, [mut y, second]) = (LEFT, LEGEND);
    let right = size(histories.len()).0 as i32;
    let mut entry = |draw: &dyn Fn(i32, i32) -> Result<(), DB>, width: i32, text: &str| {
        let wide = width + 8 + canvas.width(text, 15)? + 28;
        if x + wide > right {
            (x, y) = (LEFT, second);
        }
        draw(x, y)?;
        canvas.text((x + width + 8, y), text, 15, &INK, (HPos::Left, VPos::Center))?;
        x += wide;
        Ok::<(), DrawingAreaErrorKind<DB::ErrorType>>(())
    };
    let swatch = |color: RGBColor| move |x: i32, y: i32| canvas.rect(x..x + 22, y - 8..y + 8, color);
    if any(&|block| block.native.is_some()) {
        entry(&swatch(NATIVE), 22, "the driver's own")?;
    }
    if any(&|block| block.native.is_none()) {
        entry(&swatch(MAPPED), 22, "virtual memory, mapped")?;
    }
    if any(&|block| block.missing != 0) {
        entry(&swatch(light(MAPPED)), 22, "reserved, without memory yet")?;
    }
    if any(&|block| block.moved.is_some()) {
        let draw = |x: i32, y: i32| {
            (0..3).try_for_each(|at| {
                canvas.rect(x + 10 * at..x + 10 * at + 10, y - 8..y + 8, FAMILIES[at as usize])
            })?;
            canvas.arrow(x + 42, y + 8, y - 9)
        };
        entry(&draw, 48, "moved: the same memory has the same colour")?;
    }
    if any(&|block| block.of_host) {
        entry(&swatch(HOST), 22, "host memory: the device had none left")?;
    }
    if histories.iter().any(|of| !of.pauses.is_empty()) {
        let draw = |x: i32, y: i32| {
            canvas.rect(x..x + 22, y - 8..y + 8, MAPPED)?;
            canvas.stripes(x..x + 22, y - 8..y + 8)
        };
        entry(&draw, 22, "paused: in host memory")?;
    }
    if histories.iter().any(|of| !of.failures.is_empty()) {
        entry(&|x, y| canvas.cross((x + 8, y)), 16, "failed, with the bytes that were asked for")?;
    }
    Ok(())
}
