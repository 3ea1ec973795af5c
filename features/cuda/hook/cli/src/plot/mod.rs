//! `vmhook plot`: a picture of a log, or of two beside each other.

mod draw;
mod history;
mod layout;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Args;
use plotters::prelude::{BitMapBackend, IntoDrawingArea as _, SVGBackend};

use crate::trace::{self, Trace};
use history::History;

/// Draw a picture of a log, or of two beside each other on the same scales
#[derive(Args)]
pub(crate) struct Plot {
    /// The log, which `vmhook run --log` writes
    log: PathBuf,
    /// Another one, as of the same program with --monitor
    other: Option<PathBuf>,
    /// Where the picture goes: a file whose name ends in .png or .svg
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The process whose memory is drawn, once for each log; the first of each log without it
    #[arg(long)]
    pid: Vec<u32>,
}

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A log can't be read.
    #[error(transparent)]
    Trace(#[from] trace::Error),
    /// It is neither of the formats.
    #[error("{} ends neither in .png nor in .svg, so its format is unknown: name it so", .0.display())]
    Format(PathBuf),
    /// It can't be drawn.
    #[error("can't draw the picture: {0}")]
    Draw(String),
    /// Or written.
    #[error("can't write {}: {source}", .file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// How pictures are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Format {
    Png,
    Svg,
}

impl Plot {
    /// Draws it.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        format(&self.output)?;
        let mut traces = Vec::new();
        for (at, log) in [&self.log].into_iter().chain(&self.other).enumerate() {
            let trace = Trace::read(log, self.pid.get(at).or(self.pid.last()).copied())?;
            trace.notes.iter().for_each(|note| eprintln!("vmhook: {note}"));
            traces.push(trace);
        }
        picture(&traces, &self.output)
    }
}

/// The format that a file's name tells, if it can be written where it is named.
///
/// # Errors
/// [`Error::Format`], [`Error::Write`].
pub(crate) fn format(file: &Path) -> Result<Format, Error> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(Err(source)) = folder.map(fs::metadata) {
        return Err(Error::Write { file: file.into(), source });
    }
    match file.extension().map(|end| end.to_string_lossy().to_ascii_lowercase()).as_deref() {
        Some("png") => Ok(Format::Png),
        Some("svg") => Ok(Format::Svg),
        _ => Err(Error::Format(file.into())),
    }
}

/// Draws traces beside each other into a file.
///
/// # Errors
/// [`Error`].
pub(crate) fn picture(traces: &[Trace], file: &Path) -> Result<(), Error> {
    let histories: Vec<History> = traces.iter().map(History::of).collect();
    let size = draw::size(histories.len());
    let failed = |error: &dyn std::fmt::Display| Error::Draw(error.to_string());
    draw::fonts().map_err(|error| failed(&error))?;
    let bytes = match format(file)? {
        Format::Svg => {
            let mut text = String::new();
            let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
            draw::draw(&area, 1, &histories).map_err(|error| failed(&error))?;
            drop(area);
            text.into_bytes()
        }
        Format::Png => {
            // Drawn twice as large, so that it is smooth.
            let (width, height) = (size.0 * 2, size.1 * 2);
            let mut pixels = vec![0; width as usize * height as usize * 3];
            let area = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
            draw::draw(&area, 2, &histories).map_err(|error| failed(&error))?;
            drop(area);
            encoded(size, &halved(&pixels, width as usize)).map_err(|error| failed(&error))?
        }
    };
    vm_files::replace(file, |mut to| to.write_all(&bytes))
        .map_err(|source| Error::Write { file: file.into(), source })
}

/// Pixels of three bytes, of which four become one.
fn halved(pixels: &[u8], width: usize) -> Vec<u8> {
    let rows = pixels.chunks_exact(width * 3).collect::<Vec<_>>();
    let mut half = Vec::with_capacity(pixels.len() / 4);
    for pair in rows.chunks_exact(2) {
        for (above, below) in pair[0].chunks_exact(6).zip(pair[1].chunks_exact(6)) {
            let sum = |at: usize| {
                [above[at], above[at + 3], below[at], below[at + 3]].map(u16::from).iter().sum::<u16>()
            };
            half.extend([0, 1, 2].map(|at| (sum(at) / 4) as u8));
        }
    }
    half
}

fn encoded((width, height): (u32, u32), pixels: &[u8]) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use vm_hook::manager::{Id, Kind};

    use super::*;
    use crate::trace::{Event, Process, What};

    #[test]
    fn a_picture_goes_through_no_link_of_another_user() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can make another user's link");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::os::unix::fs::symlink(".", path("link")).expect("a link");
        let trace = Trace { process: Process::default(), events: Vec::new(), notes: Vec::new() };
        picture(std::slice::from_ref(&trace), &path("link/a.svg")).expect("root's own link");
        fs::write(path("a.svg"), "root's").expect("written");
        std::os::unix::fs::lchown(path("link"), Some(12345), None).expect("another owner");
        let error = picture(&[trace], &path("link/a.svg")).expect_err("another user's link").to_string();
        assert!(error.contains("link is a link that the user 12345 made"), "{error}");
        assert_eq!(fs::read(path("a.svg")).expect("a file"), b"root's");
    }

    #[test]
    fn any_events_can_be_drawn() {
        let folder = tempfile::tempdir().expect("a folder");
        let seed = Cell::new(0x9e37_79b9_7f4a_7c15u64);
        let below = |n: u64| {
            let mut next = seed.get();
            next ^= next << 13;
            next ^= next >> 7;
            next ^= next << 17;
            seed.set(next);
            next % n
        };
        for program in 0..200u64 {
            // Addresses, sizes and times of any magnitude, in any order.
            let magnitude = below(57);
            let events = (0..below(60)).map(|_| {
                let (bytes, missing) = (below(1 << below(57)), below(1 << below(30)));
                let (address, other) = (below(8) << magnitude.min(53), below(8) << magnitude.min(53));
                let what = match below(11) {
                    10 => What::Allocated {
                        id: Id::Array(address),
                        bytes,
                        missing: 0,
                        native: Some(Kind::Array),
                    },
                    0..3 => What::Allocated {
                        id: Id::Address(address),
                        bytes,
                        missing: missing.min(bytes),
                        native: (below(2) == 0).then_some(Kind::Pool),
                    },
                    3 => What::Freed { id: Id::Address(address) },
                    4 => What::Moved { from: address, to: other, bytes },
                    5 => What::Filled { address, bytes, of_host: below(2) == 0 },
                    6 => What::Failed { bytes: bytes.rotate_right(below(64) as u32), code: 2 },
                    7 => What::Paused { bytes },
                    8 => What::Resumed,
                    _ => What::Copied,
                };
                Event { time: below(1 << below(60)), pid: 1, what }
            });
            let events = events.collect();
            let trace = Trace { process: Process::default(), events, notes: Vec::new() };
            let traces = vec![trace; 1 + program as usize % 2];
            picture(&traces, &folder.path().join("a.svg")).expect("a picture");
        }
    }
}
