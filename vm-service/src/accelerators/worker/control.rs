//! The worker's main thread: it gives up what it does not need, opens the accelerator, and does what the VMM says.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_paravirt::{Config, Status};

use super::backend::{self, Kind, Opened};
use super::link::AnyLink;
use super::queue::Ring;
use super::ram::Ram;
use super::session::Guest;
use super::stream::Stream;
use super::watch::Watch;
use crate::accelerators::meter::Meter;
use crate::accelerators::sys;
use crate::accelerators::wire::{Order, Report, Start};
use crate::config::Trust;
use crate::deadlines::WORKER_LOOK;
use crate::os::process::packets;
use crate::os::sandbox::{self, Measures, Profile};

/// How many programs of the guest are served at a time.
const PROGRAMS: usize = 16;

/// The worker, from its start to its end: it ends when the VMM does, or with a reason. Standard input is its socket.
pub(crate) fn main() -> Result<(), String> {
    let socket = sandbox::enter(Some(sandbox::WORKER_FILES))?;
    run(&socket).inspect_err(|reason| {
        // The VMM may have gone, which is then the reason.
        let _ = packets::send(&socket, &Report::Failed(reason.clone()), &[]);
    })
}

fn run(socket: &OwnedFd) -> Result<(), String> {
    let gone = |error: io::Error| format!("nothing can be read from the VMM: {error}");
    let (open, mut files) = match packets::receive::<Order>(socket).map_err(gone)? {
        Some((Order::Open(open), files)) => (open, files),
        Some(_) => return Err("the first order is not to open an accelerator".into()),
        None => return Ok(()),
    };
    if matches!(open.trust, Trust::Driver { .. }) {
        return crate::cuda_bridge::serve_guest(socket, &open, files);
    }
    let profile = Profile::of(&open.device);
    let measures = Measures::without(&open.unconfined);
    let kind = Kind::of(&open.device, measures)?;
    let confinement = sandbox::settle(profile, measures, kind.nodes(), kind.folder().as_slice())?;
    let meter = files.pop().map(Meter::from).ok_or("there is no file for the guest's time")?;
    let ram = Arc::new(Ram::new(&open.ram, files)?);
    let deadline = Duration::from_micros(open.deadline_us);
    let opened = backend::open(kind, &open.device, ram.bytes(), open.memory, deadline)?;
    let watch = Watch::default();
    let (broken, breaks) = mpsc::channel();
    // Before the process is confined: the first look at the clock asks the Linux kernel how to read it.
    let guest = Guest::new(&open, ram.clone(), meter, watch.clone(), broken)?;
    sandbox::confine(profile, &confinement)?;
    let ready = Report::Ready { name: opened.name.clone(), target: opened.target.clone(), confinement };
    packets::send(socket, &ready, &[]).map_err(gone)?;
    let config =
        Config::new(open.memory, open.deadline_us).with_window(ram.bytes(), open.port.unwrap_or_default());
    let (mut started, programs) = (false, Arc::new(()));
    loop {
        if let Ok(reason) = breaks.try_recv() {
            packets::send(socket, &Report::Broken(reason), &[]).map_err(gone)?;
        }
        if let Some(what) = watch.overdue(Instant::now()) {
            let text = format!("{what} takes longer than it may");
            packets::send(socket, &Report::Overdue(text), &[]).map_err(gone)?;
        }
        if !readable(socket.as_fd(), WORKER_LOOK).map_err(gone)? {
            continue;
        }
        match packets::receive::<Order>(socket).map_err(gone)? {
            None => return Ok(()),
            Some((Order::Ping, _)) => packets::send(socket, &Report::Here, &[]).map_err(gone)?,
            Some((Order::Start(start), files)) => {
                if std::mem::replace(&mut started, true) {
                    return Err("it was started twice".into());
                }
                let served = ring(&ram, &start, files)
                    .and_then(|ring| serve("queue", &opened, AnyLink::Queue(ring), &guest, None));
                if let Err(reason) = served {
                    packets::send(socket, &Report::Broken(reason), &[]).map_err(gone)?;
                }
            }
            Some((Order::Connect, files)) => {
                for socket in files {
                    connect(socket, &opened, &config, &guest, &programs);
                }
            }
            Some((Order::Open(_), _)) => return Err("it was opened twice".into()),
        }
    }
}

/// The queue that a driver set up.
fn ring(ram: &Ram, start: &Start, files: Vec<OwnedFd>) -> Result<Ring, String> {
    let memory = ram.map().map_err(|error| format!("the guest's RAM can't be mapped: {error}"))?;
    Ring::new(memory, start, files.into_iter().map(sys::eventfd).collect())
}

/// Serves a link on a thread of its own.
fn serve(
    name: &str,
    opened: &Opened,
    link: AnyLink,
    guest: &Guest,
    place: Option<Arc<()>>,
) -> Result<(), String> {
    let (serve, guest) = (opened.serve.clone(), guest.clone());
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
        if let Err(reason) = serve(link, &guest) {
            guest.broken(reason);
        }
        drop(place);
    });
    thread.map(drop).map_err(|error| format!("a thread can't be started: {error}"))
}

/// Takes a program's socket. What goes wrong is the program's loss alone.
fn connect(socket: OwnedFd, opened: &Opened, config: &Config, guest: &Guest, programs: &Arc<()>) {
    let taken = Stream::new(socket, config).map_err(|error| error.to_string()).and_then(|stream| {
        // One is the main thread's.
        if Arc::strong_count(programs) > PROGRAMS {
            stream.refuse(Status::Quota);
            return Err(format!("{PROGRAMS} of them are served already"));
        }
        serve("program", opened, AnyLink::Stream(stream), guest, Some(programs.clone()))
    });
    if let Err(reason) = taken {
        tracing::debug!(reason, "a program of the guest is not served");
    }
}

fn readable(socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)) {
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
        Ok(count) => Ok(count > 0),
    }
}
