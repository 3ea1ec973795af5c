//! `vmhook watch`: what a process does with its memory, while it does it.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use clap::Args;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block as Border, Paragraph, Sparkline};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, test_kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use vm_hook::manager::Kind;

use crate::memory::Memory;
use crate::tail::{News, Tail};
use crate::trace::{Event, Parser, Process, What};
use crate::units;

/// How many of the largest allocations are shown, and how many failures.
const LARGEST: usize = 8;
const FAILURES: usize = 4;
/// How many values a graph keeps.
const GRAPH: usize = 400;
const GRAPH_ROWS: u16 = 6;

/// Show what a process does with its memory while it runs; q ends it
#[derive(Args)]
pub(crate) struct Watch {
    /// A log that `vmhook run --log` writes, or the id of a process that has the hook and such a log
    log: PathBuf,
    /// The process that is shown; the first of the log without it
    #[arg(long)]
    pid: Option<u32>,
    /// How often the log is read, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    every: u64,
}

/// Why nothing is shown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The log can't be read.
    #[error("can't read {}: {source}", .file.display())]
    Read {
        /// The log.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A process's log is not known.
    #[error("can't tell which log process {pid} writes ({why}): name the log instead")]
    Process {
        /// The process.
        pid: u32,
        /// Why.
        why: String,
    },
    /// The terminal refuses.
    #[error("can't use the terminal: {0}; `| cat` behind the command needs none")]
    Terminal(io::Error),
}

/// The log of a process, as its environment says.
fn log_of(pid: u32) -> Result<PathBuf, Error> {
    let failed = |why: String| Error::Process { pid, why };
    let environment = fs::read(format!("/proc/{pid}/environ")).map_err(|error| failed(error.to_string()))?;
    let variable =
        environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"VMM_LOG_FILE="));
    let name = variable
        .filter(|name| !name.is_empty())
        .ok_or_else(|| failed("its environment has no VMM_LOG_FILE".into()))?;
    // One that is not absolute is in the folder of the process.
    let name = PathBuf::from(String::from_utf8_lossy(name).into_owned());
    Ok(Path::new(&format!("/proc/{pid}/cwd")).join(name))
}

/// What is shown.
#[derive(Debug, Default)]
struct Board {
    process: Process,
    memory: Memory,
    first: Option<u64>,
    last: u64,
    failures: VecDeque<(u64, u64, u32)>,
    /// Allocations in a second, of the last interval.
    rate: f64,
    counted: u64,
    /// What was taken at the end of each interval.
    taken: VecDeque<u64>,
}

impl Board {
    fn take(&mut self, event: &Event) {
        let first = *self.first.get_or_insert(event.time);
        self.last = self.last.max(event.time.saturating_sub(first));
        match &event.what {
            What::Start { mode, program } => {
                (self.process.mode, self.process.program) = (mode.clone(), program.clone());
            }
            What::Failed { bytes, code } => {
                self.failures.truncate(FAILURES - 1);
                self.failures.push_front((event.time.saturating_sub(first), *bytes, *code));
            }
            _ => {}
        }
        self.memory.apply(event);
    }

    /// An interval is over.
    fn tick(&mut self, interval: Duration) {
        let allocated = self.memory.counts.allocated;
        self.rate = (allocated - self.counted) as f64 / interval.as_secs_f64().max(1e-3);
        self.counted = allocated;
        self.taken.push_front(self.memory.sums.taken());
        self.taken.truncate(GRAPH);
    }

    fn lines(&self) -> Vec<String> {
        let (sums, counts) = (&self.memory.sums, &self.memory.counts);
        let time = |micros: u64| units::time(Duration::from_micros(micros));
        if self.first.is_none() {
            return vec!["no event yet".into()];
        }
        let bytes = units::bytes;
        let mode =
            if self.process.mode.is_empty() { String::new() } else { format!(", {}", self.process.mode) };
        let mut lines = vec![
            format!("process {}{mode}, {} since the first event", self.process, time(self.last)),
            format!("taken        {}, at most {}", bytes(sums.taken()), bytes(self.memory.peak)),
            format!(
                "             {} mapped, {} of the driver's own; {} more reserved",
                bytes(sums.there()),
                bytes(sums.native),
                bytes(sums.missing)
            ),
            format!(
                "allocations  {}, of which {} are there; {:.1} in a second",
                counts.allocated,
                self.memory.live().count(),
                self.rate
            ),
            format!(
                "moves        {}, {}; copies that ran late: {}, parts that are the host's: {}",
                counts.moved,
                bytes(counts.moved_bytes),
                counts.copied,
                counts.of_host
            ),
            format!("failures     {}", counts.failed),
        ];
        if sums.paused != 0 {
            lines.push(format!("paused       {} are given back", bytes(sums.paused)));
        }
        lines.extend(self.failures.iter().map(|(at, asked, code)| {
            format!("             {} asked for at {}: CUDA's error {code}", bytes(*asked), time(*at))
        }));
        let mut largest: Vec<_> = self.memory.live().collect();
        largest.sort_by_key(|block| std::cmp::Reverse((block.bytes, block.id)));
        lines.push("largest".into());
        lines.extend(largest.iter().take(LARGEST).map(|block| {
            let kind = match block.native {
                None => "virtual".into(),
                Some(Kind::Device) => "the driver's".into(),
                Some(kind) => format!("the driver's, {}", kind.name()),
            };
            let at = if block.id.address().is_some() { "at" } else { "handle" };
            let since = time(block.since.saturating_sub(self.first.unwrap_or(0)));
            let moved = if block.moved.is_some() { ", moved here" } else { "" };
            format!(
                "             {:>9} {at} {:#014x}, {kind}, since {since}{moved}",
                bytes(block.bytes),
                block.id.number()
            )
        }));
        lines
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let lines = self.lines();
        let mut text: Vec<Line<'_>> = lines.iter().map(|line| Line::raw(line.as_str())).collect();
        text[0] = Line::styled(lines[0].as_str(), Style::new().add_modifier(Modifier::BOLD));
        let rows = [Constraint::Fill(1), Constraint::Max(GRAPH_ROWS), Constraint::Length(1)];
        let [top, graph, bottom] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(Paragraph::new(text), top);
        let values: Vec<u64> = self.taken.iter().take(graph.width.into()).rev().copied().collect();
        let title = format!(" taken, up to {} ", units::bytes(self.memory.peak));
        let spark = Sparkline::default()
            .data(&values)
            .max(self.memory.peak.max(1))
            .style(Style::new().fg(Color::Blue));
        frame.render_widget(spark.block(Border::bordered().title(title)), graph);
        let dim = Style::new().add_modifier(Modifier::DIM);
        frame.render_widget(Paragraph::new(Line::styled(" q: quit", dim)), bottom);
    }
}

/// A log that is followed.
struct Follow {
    file: PathBuf,
    tail: Tail,
    parser: Parser,
    pid: Option<u32>,
    board: Board,
}

impl Follow {
    /// Reads what is new, or a part of it if that is much.
    fn read(&mut self) -> Result<News, Error> {
        let Self { parser, pid, board, .. } = self;
        let news = self.tail.read(&mut |bytes| {
            parser.feed(bytes, &mut |event| {
                if *pid.get_or_insert(event.pid) == event.pid {
                    board.process.pid = event.pid;
                    board.take(&event);
                }
            });
        });
        let news = news.map_err(|source| Error::Read { file: self.file.clone(), source })?;
        if news == News::Restarted {
            self.parser.restart();
        }
        Ok(news)
    }

    /// Has the process of the log ended?
    fn is_over(&self) -> bool {
        let pid = self.pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
    }
}

impl Watch {
    /// Shows it, until the process has ended or somebody ends this.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        let given =
            self.log.to_str().and_then(|text| text.parse::<u32>().ok()).filter(|_| !self.log.exists());
        let file = given.map_or_else(|| Ok(self.log.clone()), log_of)?;
        let tail = Tail::open(&file).map_err(|source| Error::Read { file: file.clone(), source })?;
        let (pid, every) = (self.pid.or(given), Duration::from_millis(self.every));
        let mut follow = Follow { file, tail, parser: Parser::default(), pid, board: Board::default() };
        follow.board.process.pid = pid.unwrap_or(0);
        if io::stdin().is_terminal() && io::stdout().is_terminal() {
            follow.show(every)?;
        } else {
            follow.print(every)?;
        }
        // The last state stays in view.
        print(&follow.board);
        if follow.parser.wrong != 0 {
            eprintln!(
                "vmhook: {} lines of {} are not understood, and left out",
                follow.parser.wrong,
                follow.file.display()
            );
        }
        Ok(())
    }
}

/// Writes the board; who reads no more is told nothing.
fn print(board: &Board) {
    let _ = writeln!(io::stdout(), "{}\n", board.lines().join("\n"));
}

impl Follow {
    /// Writes the board whenever it has changed, until the process has ended.
    fn print(&mut self, every: Duration) -> Result<(), Error> {
        let (mut next, mut is_new) = (Instant::now() + every, false);
        loop {
            // What it wrote before it ended is read behind that.
            let is_over = self.is_over();
            match self.read()? {
                News::Nothing if is_over => return Ok(()),
                News::Nothing => thread::sleep(next.saturating_duration_since(Instant::now())),
                News::More | News::Restarted => is_new = true,
            }
            if Instant::now() >= next {
                next = Instant::now() + every;
                self.board.tick(every);
                if std::mem::take(&mut is_new) {
                    print(&self.board);
                }
            }
        }
    }

    /// Shows the board on the terminal.
    fn show(&mut self, every: Duration) -> Result<(), Error> {
        let ended = Arc::new(AtomicBool::new(false));
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&ended)).map_err(Error::Terminal)?;
        }
        let mut terminal = ratatui::try_init().map_err(Error::Terminal)?;
        let result = self.frames(every, &ended, &mut terminal);
        let restored = ratatui::try_restore().map_err(Error::Terminal);
        result.and(restored)
    }

    fn frames(
        &mut self,
        every: Duration,
        ended: &AtomicBool,
        terminal: &mut ratatui::DefaultTerminal,
    ) -> Result<(), Error> {
        let mut next = Instant::now();
        loop {
            let is_over = self.is_over();
            let news = self.read()?;
            if Instant::now() >= next {
                next = Instant::now() + every;
                self.board.tick(every);
                terminal.draw(|frame| self.board.draw(frame)).map_err(Error::Terminal)?;
            }
            let wait = match news {
                News::Nothing if is_over => return Ok(()),
                News::Nothing => next.saturating_duration_since(Instant::now()),
                News::More | News::Restarted => Duration::ZERO,
            };
            if ended.load(Ordering::Relaxed) || is_quit(wait, ended)? {
                return Ok(());
            }
        }
    }
}

/// Waits for so long; true once somebody wants to quit, or the terminal is gone.
fn is_quit(wait: Duration, ended: &AtomicBool) -> Result<bool, Error> {
    let until = Instant::now() + wait;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let input = io::stdin();
        let mut files = [PollFd::new(&input, PollFlags::IN)];
        match poll(&mut files, Some(&time)) {
            Ok(0) => return Ok(false),
            Ok(_) => {
                let mut keys = [0; 64];
                let read =
                    rustix::io::read(&input, &mut keys).map_err(|error| Error::Terminal(error.into()))?;
                // The end of the input, and what Ctrl-C and Ctrl-D are on a raw terminal.
                if read == 0 || keys[..read].iter().any(|key| [b'q', b'Q', 3, 4].contains(key)) {
                    return Ok(true);
                }
            }
            Err(rustix::io::Errno::INTR) if !ended.load(Ordering::Relaxed) => {}
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(error) => return Err(Error::Terminal(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use vm_hook::manager::Id;

    use super::*;

    fn board(whats: impl IntoIterator<Item = What>) -> Board {
        let mut board = Board::default();
        for (time, what) in (10_000_000..).step_by(1_000_000).zip(whats) {
            board.take(&Event { time, pid: 7, what });
        }
        board.process.pid = 7;
        board
    }

    fn start() -> What {
        What::Start { mode: "VMM".into(), program: "/bin/train".into() }
    }

    #[test]
    fn the_board_tells_what_happened() {
        let check = |whats: Vec<What>, says: &[&str]| {
            let text = board(whats).lines().join("\n");
            assert!(says.iter().all(|says| text.contains(says)), "{text}");
        };
        let allocated =
            |address, bytes| What::Allocated { id: Id::Address(address), bytes, missing: 0, native: None };
        check(vec![], &["no event yet"]);
        check(
            vec![start(), allocated(0x200000, 4 << 20)],
            &["process 7 (/bin/train), VMM, 1 s since", "taken        4 MiB"],
        );
        let array =
            What::Allocated { id: Id::Array(9), bytes: 1 << 20, missing: 0, native: Some(Kind::Array) };
        check(
            vec![start(), array],
            &["1 MiB of the driver's own", "1 MiB handle 0x000000000009, the driver's, array, since 1 s"],
        );
        check(
            vec![start(), What::Failed { bytes: 3 << 30, code: 2 }],
            &["failures     1", "3 GiB asked for at 1 s: CUDA's error 2"],
        );
        let paused = [start(), allocated(0x200000, 4 << 20), What::Paused { bytes: 3 << 20 }];
        check(paused.to_vec(), &["taken        1 MiB, at most 4 MiB", "paused       3 MiB are given back"]);
        let failures = (1..9).map(|bytes| What::Failed { bytes, code: 2 });
        check(
            [start()].into_iter().chain(failures).collect(),
            &["failures     8", " 8 B asked", " 5 B asked"],
        );
        let moved = What::Moved { from: 1 << 21, to: 1 << 22, bytes: 2 << 20 };
        let grown = vec![start(), allocated(1 << 21, 2 << 20), allocated(1 << 22, 3 << 20), moved];
        check(grown, &["moves        1, 2 MiB;", "3 MiB at 0x000000400000, virtual, since 2 s, moved here"]);
    }

    #[test]
    fn rates_are_of_an_interval() {
        let mut board = board([
            start(),
            What::Allocated { id: Id::Array(1), bytes: 2, missing: 0, native: Some(Kind::Array) },
        ]);
        board.tick(Duration::from_millis(500));
        assert_eq!((board.rate, board.taken.front()), (2.0, Some(&2)));
        board.tick(Duration::from_millis(500));
        assert_eq!(board.rate, 0.0);
    }

    #[test]
    fn it_fits_on_any_screen() {
        for (width, height) in [(0, 0), (1, 1), (20, 4), (80, 24), (300, 100)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a screen");
            let board = board([start()]);
            terminal.draw(|frame| board.draw(frame)).expect("drawn");
            let shows = width != 0 && terminal.backend().to_string().contains("/bin/train");
            assert_eq!(shows, width >= 80, "{width} x {height}");
        }
    }

    #[test]
    fn a_process_tells_its_log() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .env("VMM_LOG_FILE", "some.log")
            .spawn()
            .expect("a process");
        // A process has its environment a moment after it was started.
        let log = (0..10_000).find_map(|_| {
            thread::sleep(Duration::from_millis(1));
            log_of(child.id()).ok()
        });
        let none = log_of(std::process::id()).map_err(|error| error.to_string());
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert_eq!(log.expect("a log").file_name().expect("a name"), "some.log");
        assert!(none.expect_err("no log").contains("its environment has no VMM_LOG_FILE"));
    }
}
