//! `egpu monitor`: GPUs as they change, on a screen or as lines of JSON.

use std::os::fd::AsFd as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, iter};

use clap::Args;
use ratatui::backend::CrosstermBackend;
use ratatui::layout::Rect;
use ratatui::{Terminal, TerminalOptions, Viewport};
use signal_hook::consts::SIGWINCH;
use signal_hook::iterator::Signals;

use super::status::{WhichArgs, none};
use crate::api::Body;
use crate::cli::context::Context;
use crate::cli::monitor::{Board, Observation, Sampler, Screen, View, draw};
use crate::failure::Failure;
use crate::guest::console::{Input, Keyboard};
use crate::log;
use crate::os::signals::StopSignals;

/// Arguments of `egpu monitor`.
#[derive(Debug, Args)]
pub(crate) struct MonitorArgs {
    #[command(flatten)]
    which: WhichArgs,
    /// Milliseconds from one reading to the next, from 50 to 3600000, an hour
    #[arg(short, long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u32).range(50..=3_600_000))]
    interval: u32,
    /// End after so many readings
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// Shows GPUs until it is asked to end; in JSON, one document a line.
///
/// # Errors
/// When there is no such GPU, or neither a terminal nor JSON.
pub(super) fn run(context: &mut Context<'_>, args: &MonitorArgs) -> Result<(), Failure> {
    let which = args.which.which();
    let sampler = Sampler::new(&context.host, which)?;
    if sampler.gpus().is_empty() {
        return Err(Failure::failed(none(which)));
    }
    let ticks = Ticks::new(Duration::from_millis(args.interval.into()), args.count);
    match context.json {
        true => stream(context, sampler, ticks),
        false => show(context, sampler, ticks),
    }
}

/// How long to wait until a terminal that has not taken all of a frame gets more.
const BEHIND: Duration = Duration::from_millis(100);

/// The moments at which GPUs are read.
#[derive(Clone, Copy, Debug)]
struct Ticks {
    interval: Duration,
    left: Option<u64>,
    next: Instant,
}

impl Ticks {
    fn new(interval: Duration, count: Option<u64>) -> Self {
        Self { interval, left: count, next: Instant::now() }
    }

    /// How long it is to the next one; `None` when there is none. Those that were missed, as in a host that slept, are left out.
    fn wait(&mut self) -> Option<Duration> {
        self.left = match self.left {
            Some(0) => return None,
            left => left.map(|left| left - 1),
        };
        let now = Instant::now();
        let wait = self.next.saturating_duration_since(now);
        self.next = (self.next + self.interval).max(now);
        Some(wait)
    }
}

/// A document a line, until the reader has had enough.
fn stream(context: &mut Context<'_>, mut sampler: Sampler, mut ticks: Ticks) -> Result<(), Failure> {
    let mut board = Board::new();
    let mut before = None;
    while let Some(wait) = ticks.wait() {
        std::thread::sleep(wait);
        let seen = sampler.sample(ticks.interval);
        let at = seen.at;
        board.observe(seen);
        let elapsed = before.replace(at).map(|before| at.saturating_duration_since(before).as_secs_f64());
        let gpus = board.panels().iter().map(|panel| panel.sample()).collect();
        let body = Body::EgpuMonitor { time: log::now(), elapsed_seconds: elapsed, gpus };
        let document = context.document(body);
        let line = serde_json::to_string(&document).map_err(Failure::failed)?;
        writeln!(context.out, "{line}")?;
        context.out.flush()?;
    }
    Ok(())
}

/// What happens while a screen is shown.
enum Event {
    Seen(Observation),
    /// As many GPUs were read as were asked for.
    Counted,
    Typed(Vec<u8>),
    /// Nothing more can be typed: the terminal is gone.
    InputEnded,
    Resized,
    Stop,
}

fn show(context: &mut Context<'_>, sampler: Sampler, ticks: Ticks) -> Result<(), Failure> {
    let no_terminal = || {
        Failure::usage(
            "a screen needs a terminal that can show one, as standard input and output of a job in the foreground; \
             `--json` prints lines of JSON anywhere",
        )
    };
    if std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb") {
        return Err(no_terminal());
    }
    let lost = |error: io::Error| Failure::failed(format_args!("the terminal can't be used: {error}"));
    let (send, receive) = channel();
    // Before the terminal is taken: a signal between the two would leave it as it is.
    let on = send.clone();
    let signals = StopSignals::start(move |_| drop(on.send(Event::Stop))).map_err(lost)?;
    let screen = Screen::enter(io::stdin().as_fd(), io::stdout().as_fd()).map_err(lost)?;
    let Some(screen) = screen else { return Err(no_terminal()) };
    let sources = Sources::start(signals, sampler, ticks, &send).map_err(lost)?;
    drop(send);
    let view = View {
        first: 0,
        interval: format!("{} ms", ticks.interval.as_millis()),
        is_simulated: context.is_simulated(),
    };
    let scene = Scene { board: Board::new(), view, is_spoilt: false };
    let shown = Shown { screen, scene, sink: Sink::default(), terminal: None };
    let ended = shown.run(&receive).map_err(lost);
    drop(sources);
    ended
}

/// What makes events, until it is dropped.
struct Sources {
    _signals: StopSignals,
    _keyboard: Keyboard,
    resizes: signal_hook::iterator::Handle,
    _end: Sender<()>,
}

impl Sources {
    fn start(
        signals: StopSignals,
        mut sampler: Sampler,
        mut ticks: Ticks,
        events: &Sender<Event>,
    ) -> io::Result<Self> {
        let mut changes = Signals::new([SIGWINCH])?;
        let resizes = changes.handle();
        let on = events.clone();
        let wait = move || changes.forever().try_for_each(|_| on.send(Event::Resized));
        std::thread::Builder::new().name("resizes".into()).spawn(wait)?;
        let typed = Typed(events.clone());
        let _keyboard = Keyboard::start(io::stdin().as_fd(), move |input| typed.take(input))?;
        let on = events.clone();
        let (_end, ended) = channel::<()>();
        // It is left behind where it waits for a driver; nothing is ever sent to it.
        let read = move || {
            while let Some(wait) = ticks.wait() {
                if ended.recv_timeout(wait) != Err(RecvTimeoutError::Timeout)
                    || on.send(Event::Seen(sampler.sample(ticks.interval))).is_err()
                {
                    return;
                }
            }
            let _ = on.send(Event::Counted);
        };
        std::thread::Builder::new().name("sampler".into()).spawn(read)?;
        Ok(Self { _signals: signals, _keyboard, resizes, _end })
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        self.resizes.close();
    }
}

/// Hands on what is typed, and tells when no more can be.
struct Typed(Sender<Event>);

impl Typed {
    fn take(&self, input: Input) {
        let bytes = match input {
            Input::Guest(bytes) => bytes,
            // Ctrl-A x, as at a console.
            Input::Quit => b"q".to_vec(),
            Input::Help | Input::PowerButton => return,
        };
        let _ = self.0.send(Event::Typed(bytes));
    }
}

impl Drop for Typed {
    fn drop(&mut self) {
        let _ = self.0.send(Event::InputEnded);
    }
}

/// The bytes of a frame, until the terminal takes them.
#[derive(Clone, Debug, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What is to be shown.
struct Scene {
    board: Board,
    view: View,
    /// Whether the terminal may show something else than was drawn.
    is_spoilt: bool,
}

/// Why it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// As many GPUs were read as were asked for.
    Counted,
    Asked,
}

impl Scene {
    /// Takes an event and those that wait behind it, up to one that ends it: a terminal that takes its time for a frame must
    /// not put off the end until there was a frame for each reading before it.
    ///
    /// # Errors
    /// When nothing more can be typed.
    fn take(&mut self, first: Event, waiting: &Receiver<Event>) -> io::Result<Option<End>> {
        for event in iter::once(first).chain(waiting.try_iter()) {
            match event {
                Event::Seen(seen) => self.board.observe(seen),
                Event::Typed(bytes) => {
                    if keys(&bytes).into_iter().any(|key| self.press(key)) {
                        return Ok(Some(End::Asked));
                    }
                }
                Event::Resized => self.is_spoilt = true,
                Event::Counted => return Ok(Some(End::Counted)),
                Event::Stop => return Ok(Some(End::Asked)),
                Event::InputEnded => return Err(io::Error::other("it is gone")),
            }
        }
        Ok(None)
    }

    /// Does what a key means; `true` when that is to end.
    fn press(&mut self, key: Key) -> bool {
        match key {
            Key::Quit => return true,
            Key::Up => self.view.first = self.view.first.saturating_sub(1),
            Key::Down => {
                let last = self.board.panels().len().saturating_sub(1);
                self.view.first = (self.view.first + 1).min(last);
            }
            Key::Redraw => self.is_spoilt = true,
        }
        false
    }
}

/// A scene on a screen.
struct Shown {
    screen: Screen,
    scene: Scene,
    sink: Sink,
    /// What is on the screen, and its size; `None` where that is not known.
    terminal: Option<(Rect, Terminal<CrosstermBackend<Sink>>)>,
}

impl Shown {
    fn run(mut self, events: &Receiver<Event>) -> io::Result<()> {
        loop {
            // What the terminal has not taken goes on without another event.
            let event = match self.screen.is_behind() {
                true => events.recv_timeout(BEHIND),
                false => events.recv().map_err(RecvTimeoutError::from),
            };
            let end = match event {
                Ok(event) => self.scene.take(event, events)?,
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("the thread that reads GPUs has ended"));
                }
            };
            if end == Some(End::Asked) {
                return Ok(());
            }
            self.draw()?;
            if end == Some(End::Counted) {
                return Ok(());
            }
        }
    }

    fn draw(&mut self) -> io::Result<()> {
        // What it has not taken of the last frame must go first; until then it is spared another.
        if !self.screen.flush()? {
            return Ok(());
        }
        if std::mem::take(&mut self.scene.is_spoilt) {
            self.terminal = None;
        }
        let area = self.screen.size();
        let terminal = match &mut self.terminal {
            Some((size, terminal)) if *size == area => terminal,
            place => {
                crossterm::queue!(
                    self.sink,
                    crossterm::terminal::Clear(crossterm::terminal::ClearType::All)
                )?;
                let options = TerminalOptions { viewport: Viewport::Fixed(area) };
                let terminal = Terminal::with_options(CrosstermBackend::new(self.sink.clone()), options)?;
                &mut place.insert((area, terminal)).1
            }
        };
        terminal.draw(|frame| draw(frame, &self.scene.board, &self.scene.view))?;
        self.screen.show(&self.sink.take())?;
        Ok(())
    }
}

/// What a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Quit,
    Up,
    Down,
    Redraw,
}

/// The keys of what a terminal sends for them; those that mean nothing are left out.
fn keys(mut bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    while let [first, rest @ ..] = bytes {
        bytes = rest;
        match (first, rest) {
            // A sequence, whose letters are no keys.
            (0x1b, [b'[' | b'O', rest @ ..]) => {
                let end = rest.iter().position(|byte| (0x40..=0x7e).contains(byte));
                let Some((last, behind)) = end.and_then(|end| rest.get(end..)?.split_first()) else { break };
                keys.extend(match (end, last) {
                    (Some(0), b'A') => Some(Key::Up),
                    (Some(0), b'B') => Some(Key::Down),
                    _ => None,
                });
                bytes = behind;
            }
            (b'k', _) => keys.push(Key::Up),
            (b'j', _) => keys.push(Key::Down),
            // And Ctrl-C and Ctrl-D.
            (b'q' | b'Q' | 0x03 | 0x04, _) => keys.push(Key::Quit),
            // Ctrl-L.
            (0x0c, _) => keys.push(Key::Redraw),
            _ => {}
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_what_is_typed() {
        let check = |bytes: &[u8], expect: &[Key]| assert_eq!(keys(bytes), expect, "{bytes:?}");
        check(b"", &[]);
        check(b"q", &[Key::Quit]);
        check(b"\x03", &[Key::Quit]);
        check(b"\x1b", &[]);
        check(b"xyQ", &[Key::Quit]);
        check(b"\x1b[A\x1bOBj", &[Key::Up, Key::Down, Key::Down]);
        check(b"\x1b[15~\x1b[1;5A", &[]);
        check(b"\x1b[1;5q", &[]);
        check(b"\x1b[5~q", &[Key::Quit]);
        check(b"\x1b[\x1bq", &[]);
        check(b"\x1b[", &[]);
        check(b"\x0ck", &[Key::Redraw, Key::Up]);
        check(&[0xff, 0xc3], &[]);
    }

    #[test]
    fn what_ends_it_is_not_put_off_by_what_waits_before_it() {
        let check = |events: &[fn() -> Event], expect: Option<End>, first: usize, left: usize| {
            let (send, waiting) = channel();
            events.iter().for_each(|event| send.send(event()).expect("there is a receiver"));
            let view = View { first: 1, interval: String::new(), is_simulated: false };
            let mut scene = Scene { board: Board::new(), view, is_spoilt: false };
            let event = waiting.recv().expect("there is an event");
            assert_eq!(scene.take(event, &waiting).expect("the terminal is there"), expect);
            assert_eq!((scene.view.first, waiting.try_iter().count()), (first, left));
        };
        let seen = || Event::Seen(Observation { at: Instant::now(), gpus: Vec::new() });
        let up = || Event::Typed(b"k".to_vec());
        check(&[seen], None, 1, 0);
        check(&[seen, up, seen, || Event::Resized], None, 0, 0);
        check(&[seen, seen, seen, || Event::Stop, up], Some(End::Asked), 1, 1);
        check(&[seen, || Event::Typed(b"kq".to_vec()), seen], Some(End::Asked), 0, 1);
        check(&[up, seen, || Event::Counted], Some(End::Counted), 0, 0);
    }

    #[test]
    fn moments_that_were_missed_are_left_out() {
        let mut ticks = Ticks::new(Duration::from_secs(3600), Some(2));
        assert_eq!(ticks.wait(), Some(Duration::ZERO));
        let wait = ticks.wait().expect("a second one");
        assert!(wait > Duration::from_secs(3000) && wait <= Duration::from_secs(3600), "{wait:?}");
        assert_eq!(ticks.wait(), None);
        let mut late = Ticks {
            next: Instant::now() - Duration::from_millis(5),
            ..Ticks::new(Duration::from_millis(1), None)
        };
        assert_eq!(late.wait(), Some(Duration::ZERO));
        assert!(late.next >= Instant::now() - Duration::from_secs(60));
    }
}
