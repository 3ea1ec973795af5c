//! The program's session: its connection, and a lane per thread.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use vm_bridge::orders::Order;
use vm_bridge::ring::{Near, PLACES, SIZES};
use vm_bridge::wire::preamble::{Preamble, Token};
use vm_bridge::wire::{Answer, Header, Reader, VERSION, WINDOW, code, control, own};

use crate::connect::{Place, Refused};
use crate::connection::Connection;
use crate::hand::Managed;
use crate::known::{Devices, Known};
use crate::sys::window::Window;
use crate::sys::{fork, print};
use crate::{counts, current, say};

/// How long an answer is waited for, but that of a call that waits for the device: compilers may take minutes.
const PATIENCE: Duration = Duration::from_secs(600);

/// Memory of the program that it registered.
#[derive(Clone, Copy)]
pub(crate) struct Registered {
    pub(crate) len: u64,
    pub(crate) flags: u32,
    /// Where both sides have it too, if they do: it is mapped from a file.
    pub(crate) shared: Option<u64>,
    /// The context in which it was registered, with which that ends.
    pub(crate) context: u64,
}

/// The session.
pub(crate) struct Client {
    /// Never closed: a child closes its copy when it is forked, and the process's end closes it else.
    control: Mutex<ManuallyDrop<Connection>>,
    place: Place,
    /// Where files don't go over the connection: what names the session to further ones.
    pub(crate) token: Option<Token>,
    /// Memory that the server has too, where files don't go over the connection.
    pub(crate) window: Mutex<Option<Arc<Window>>>,
    tickets: AtomicU64,
    /// What all calls say once the server is gone, or has ended the session; 0 before.
    ended: AtomicU32,
    /// `cuInit` has succeeded.
    pub(crate) ready: AtomicBool,
    generation: u64,
    /// `CUDA_LAUNCH_BLOCKING` is set: an error is told by the call that made it.
    is_blocking: bool,
    /// Cached answers and attributes.
    pub(crate) known: Mutex<Known>,
    pub(crate) devices: Mutex<Devices>,
    /// Memory that both sides have.
    pub(crate) windows: Mutex<BTreeMap<u64, u64>>,
    /// Where in the window such memory is, of that which is there.
    pub(crate) parts: Mutex<BTreeMap<u64, u64>>,
    /// One connection of this session is opened at a time: the server takes no more than a few that it does not know yet.
    opening: Mutex<()>,
    /// Lanes of the window that have ended here: what ends when they have there, and where they are.
    closing: Mutex<Vec<(UnixStream, u64)>>,
    /// Memory of the host that is this program's own: how long it is by where it begins.
    pub(crate) own: Mutex<BTreeMap<u64, u64>>,
    /// Has a graph a copy that reads memory which only this program has?
    pub(crate) fetches: AtomicBool,
    /// Where memory of both sides is placed next. No place is taken again before all have been: what still has an address of the driver's finds
    /// nothing there then, and no other memory.
    pub(crate) next_place: AtomicU64,
    /// Other ends of the files that the program was given for memory, and what they say.
    pub(crate) exported: Mutex<Vec<(UnixStream, [u64; 2])>>,
    /// Memory of the program that it registered.
    pub(crate) registered: Mutex<BTreeMap<u64, Registered>>,
    /// Managed memory of the program.
    pub(crate) managed: Mutex<Managed>,
    /// Flags of the devices' primary contexts, and whether they are active, as they were asked last.
    pub(crate) primaries: Mutex<HashMap<i32, (u32, u32)>>,
    /// The primary contexts of devices, after they were retained.
    pub(crate) retained: Mutex<HashMap<i32, u64>>,
    /// Does a thread call what streams call?
    pub(crate) calls: Mutex<bool>,
}

static CLIENT: Mutex<Option<Arc<Client>>> = Mutex::new(None);

thread_local! {
    static LANE: RefCell<Option<Lane>> = const { RefCell::new(None) };
}

pub(crate) fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process's session, which begins when it is first asked for.
pub(crate) fn client() -> Result<Arc<Client>, u32> {
    let generation = fork::generation();
    let mut client = locked(&CLIENT);
    if let Some(known) = &*client {
        if known.generation == generation {
            return Ok(known.clone());
        }
        if known.ready.load(Ordering::Relaxed) {
            return Err(code::NOT_INITIALIZED);
        }
    }
    let made = Arc::new(Client::connect(generation)?);
    *client = Some(made.clone());
    Ok(made)
}

/// This process's session, if it has begun and works.
pub(crate) fn known() -> Option<Arc<Client>> {
    let generation = fork::generation();
    let known = locked(&CLIENT).clone()?;
    (known.generation == generation && known.ready.load(Ordering::Relaxed)).then_some(known)
}

impl Client {
    fn connect(generation: u64) -> Result<Self, u32> {
        counts::begin();
        let place = Place::named()?;
        let (stream, token) = place.session()?;
        fork::close_in_children(stream.as_fd().as_raw_fd());
        let client = Self {
            control: Mutex::new(ManuallyDrop::new(stream)),
            window: Mutex::new(token.and_then(|_| window(&place))),
            place,
            token,
            tickets: AtomicU64::new(0),
            ended: AtomicU32::new(0),
            ready: AtomicBool::new(false),
            generation,
            is_blocking: std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value == "1"),
            known: Mutex::default(),
            devices: Mutex::default(),
            windows: Mutex::default(),
            parts: Mutex::default(),
            opening: Mutex::default(),
            closing: Mutex::default(),
            own: Mutex::default(),
            fetches: AtomicBool::new(false),
            next_place: AtomicU64::new(WINDOW.start),
            exported: Mutex::default(),
            registered: Mutex::default(),
            managed: Mutex::default(),
            primaries: Mutex::default(),
            retained: Mutex::default(),
            calls: Mutex::default(),
        };
        match client
            .order([control::HELLO, VERSION.into(), 0, 0], None)
            .and_then(|()| client.send_variables())
            .and_then(|()| client.prove_window())
        {
            Ok(()) => Ok(client),
            Err(code) => Err(client.place.refused(code)),
        }
    }

    /// Makes objects, where they are not 0, the owners of another.
    pub(crate) fn own(&self, owners: [u64; 2], object: u64) {
        let mut known = locked(&self.known);
        owners.into_iter().filter(|owner| *owner != 0).for_each(|owner| known.own(owner, object));
    }

    /// Drops all that is known of an object that has ended, and of the objects that it owns.
    pub(crate) fn end_object(&self, object: u64) {
        if object == 0 {
            return;
        }
        let ended = locked(&self.known).end(object);
        locked(&self.devices).end(&ended);
    }

    /// Drops all that is known of a context that has ended, and every answer: those about libraries and kernels, which live on, may name its objects.
    pub(crate) fn end_context(&self, context: u64) {
        self.end_object(context);
        locked(&self.known).forget_answers();
    }

    /// Sends what of the environment the driver reads when it starts.
    fn send_variables(&self) -> Result<(), u32> {
        for (at, name) in control::VARIABLES.iter().enumerate() {
            let value = std::env::var(name).ok().filter(|value| value.len() <= control::VALUE);
            if let Some(value) = value {
                self.exchange([control::VARIABLE, at as u64, value.len() as u64, 0], value.as_bytes(), None)?;
            }
        }
        Ok(())
    }

    /// Says something over the connection itself.
    pub(crate) fn order(&self, words: Order, file: Option<BorrowedFd<'_>>) -> Result<(), u32> {
        self.exchange(words, &[], file)
    }

    fn exchange(&self, words: Order, more: &[u8], file: Option<BorrowedFd<'_>>) -> Result<(), u32> {
        let given = locked(&self.control).give(words, more, file.as_slice());
        match given {
            Ok(0) => Ok(()),
            Ok(word) if word & control::ENDED != 0 => Err(self.end(word as u32, "it has ended the session")),
            Ok(code) => Err(code as u32),
            Err(error) => Err(self.lost(&error)),
        }
    }

    /// Asks for the memory of a device, by its UUID.
    pub(crate) fn memory(&self, [first, second]: [u64; 2]) -> Result<[u64; control::MEMORY_WORDS], u32> {
        let ended = self.ended.load(Ordering::Relaxed);
        if ended != 0 {
            return Err(ended);
        }
        let mut control = locked(&self.control);
        let asked = control.give_for_words([control::MEMORY, first, second, 0]);
        drop(control);
        asked.map_err(|error| self.lost(&error))?
    }

    /// Takes a part of the window, for a lane or for all else: where it is, and what is written there.
    pub(crate) fn take(&self, len: u64, is_lane: bool) -> Result<(u64, u64), u32> {
        let mut control = locked(&self.control);
        let taken = control.give_for_words([control::TAKE, len, is_lane.into(), 0]);
        drop(control);
        taken.map_err(|error| self.lost(&error))?.map(|[start, mark]| (start, mark))
    }

    /// Proves to the server that this program maps its window.
    fn prove_window(&self) -> Result<(), u32> {
        let Some(window) = locked(&self.window).clone() else { return Ok(()) };
        let challenged = locked(&self.control).give_for_words([control::CHALLENGE, 0, 0, 0]);
        let why = match challenged.map_err(|error| self.lost(&error))? {
            Ok([offset]) => match window.challenge(offset) {
                Some([first, second]) => match self.order([control::PROVE, first, second, 0], None) {
                    Err(code::INVALID_VALUE) => "it is not the server's",
                    proven => return proven,
                },
                None => "it is shorter than the server's",
            },
            Err(code::NOT_SUPPORTED) => "the server has none",
            Err(code) => return Err(code),
        };
        self.give_window_up(why);
        Ok(())
    }

    /// Does without the window from now on.
    pub(crate) fn give_window_up(&self, why: &str) {
        say::once(&format!("the window is not used: {why}; memory of the host is copied"));
        *locked(&self.window) = None;
    }

    /// Gives back the parts of lanes that the server has done with.
    fn give_lanes(&self) {
        let ended = |stream: &UnixStream| {
            // A byte may be there that was to wake this side.
            let mut bytes = [0; 64];
            loop {
                match recv(stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return true,
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return error != Errno::AGAIN,
                }
            }
        };
        let ended: Vec<_> = locked(&self.closing).extract_if(.., |(stream, _)| ended(stream)).collect();
        for (_, offset) in ended {
            // It fails where the session has ended, and all that it had is given back.
            let _ = self.order([control::GIVE, offset, 0, 0], None);
        }
    }

    /// A lane in the window, if there is room.
    fn lane_in_window(&self) -> Option<(Near, u64)> {
        let token = self.token?;
        let window = locked(&self.window).clone().filter(|window| window.is_cached())?;
        self.give_lanes();
        let (len, (offset, mark)) = SIZES.iter().find_map(|len| Some((*len, self.take(*len, true).ok()?)))?;
        let lane = || -> io::Result<Near> {
            // It is as a lane begins before the server sees it.
            let mut ring = window.lane(offset, len, mark)?;
            let _opening = locked(&self.opening);
            match self.place.open_with(Preamble::Ring(token), &[offset, len])? {
                Connection::Plain(stream) => ring.wake_by(stream),
                Connection::Tls(_) => return Err(io::ErrorKind::Unsupported.into()),
            }
            Ok(ring)
        };
        match lane() {
            Ok(ring) => Some((ring, offset)),
            Err(error) => {
                say::quietly(&format!("a lane is not in the window: {error}"));
                // As above.
                let _ = self.order([control::GIVE, offset, 0, 0], None);
                None
            }
        }
    }

    /// Can memory of the host be the same on both sides?
    pub(crate) fn shares_memory(&self) -> bool {
        self.token.is_none() || locked(&self.window).is_some()
    }

    /// Opens a connection of this session: for a lane, or for calls of its functions.
    pub(crate) fn open(&self, order: u64) -> Result<Connection, u32> {
        let Some(token) = self.token else {
            let (ours, theirs) = UnixStream::pair().map_err(|_| code::OUT_OF_MEMORY)?;
            self.order([order, 0, 0, 0], Some(theirs.as_fd()))?;
            return Ok(Connection::Plain(ours));
        };
        let preamble = match order {
            control::LANE => Preamble::Lane(token),
            _ => Preamble::Callbacks(token),
        };
        let _opening = locked(&self.opening);
        self.place.open(preamble).map_err(|error| {
            match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                // The rest of the session is not affected. `NO_DEVICE`: the server has no descriptor left.
                Some(Refused(code::NO_DEVICE)) => code::OUT_OF_MEMORY,
                Some(Refused(code)) => *code,
                None => self.lost(&error),
            }
        })
    }

    /// The server is gone, for ever; or it has said why the session is.
    fn lost(&self, error: &io::Error) -> u32 {
        let mut control = locked(&self.control);
        let known = self.ended.load(Ordering::SeqCst);
        if known != 0 {
            return known;
        }
        let code = last_word(&mut control).unwrap_or(code::UNAVAILABLE);
        match error.kind() {
            io::ErrorKind::UnexpectedEof => self.end(code, "it has closed the connection"),
            _ => self.end(code, &error.to_string()),
        }
    }

    /// All calls say this from now on, if they don't say something already.
    fn end(&self, code: u32, why: &str) -> u32 {
        match self.ended.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) if code == code::LAUNCH_TIMEOUT => {
                say::once(
                    "the server has ended this program's session: what it has on the device made no progress within the deadline",
                );
                code
            }
            Ok(_) => {
                say::once(&format!("the server is gone: {why}; all that this program had there is lost"));
                code
            }
            Err(known) => known,
        }
    }

    /// Has the server closed the connection?
    fn is_gone(&self) -> bool {
        let Ok(control) = self.control.try_lock() else { return self.ended.load(Ordering::Relaxed) != 0 };
        let mut fds = [PollFd::new(&**control, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Does something with this thread's lane.
    fn with_lane<T>(self: &Arc<Self>, act: impl FnOnce(&mut Lane) -> io::Result<T>) -> Result<T, u32> {
        let ended = self.ended.load(Ordering::Relaxed);
        if ended != 0 {
            return Err(ended);
        }
        let act = |slot: &mut Option<Lane>| -> Result<T, u32> {
            if slot.as_ref().is_none_or(|lane| lane.client.generation != self.generation) {
                *slot = Some(Lane::new(self)?);
            }
            let lane = slot.as_mut().ok_or(code::UNAVAILABLE)?;
            act(lane).map_err(|error| self.lost(&error))
        };
        let mut act = Some(act);
        let made = LANE
            .try_with(|lane| lane.try_borrow_mut().ok().and_then(|mut lane| Some(act.take()?(&mut lane))));
        match (made, act) {
            (Ok(Some(result)), _) => result,
            // The thread ends, or was interrupted in a call: one lane for this call, with the thread's context.
            (_, Some(act)) => {
                let mut lane = Lane::new(self)?;
                let set = vm_cuda_api::number("cuCtxSetCurrent").ok_or(code::UNAVAILABLE)?;
                let context = current::get();
                if context != 0 {
                    let sent = lane.send(set as u16, false, [&context.to_ne_bytes(), &[]]);
                    sent.map_err(|error| self.lost(&error))?;
                }
                act(&mut Some(lane))
            }
            _ => Err(code::UNAVAILABLE),
        }
    }

    /// Sends a call, and goes on, unless the program wants each call to have ended when it returns.
    pub(crate) fn post(self: &Arc<Self>, call: usize, payload: &[u8]) -> Result<(), u32> {
        if self.is_blocking {
            return self.ask(call, payload, true).map(drop);
        }
        self.with_lane(|lane| lane.send(call as u16, false, [payload, &[]]))
    }

    /// Sends a call with bytes for the driver, and goes on.
    pub(crate) fn post_bulk(self: &Arc<Self>, call: usize, payload: &[u8], bulk: &[u8]) -> Result<(), u32> {
        self.with_lane(|lane| lane.send(call as u16, false, [payload, bulk]))
    }

    /// Sends a call with bytes for the driver, and waits for its answer.
    pub(crate) fn ask_bulk(
        self: &Arc<Self>,
        call: usize,
        parts: [&[u8]; 2],
        waits: bool,
    ) -> Result<Vec<u8>, u32> {
        let mut reply = Vec::new();
        let (code, printed) = self.with_lane(|lane| {
            lane.send(call as u16, true, parts)?;
            Ok((lane.receive(&mut reply, waits)?, lane.printed()))
        })?;
        if printed {
            self.print();
        }
        if code == 0 { Ok(reply) } else { Err(code) }
    }

    /// Prints what the driver has printed for this program.
    fn print(self: &Arc<Self>) {
        /// So much that nobody prints more between two calls.
        const MOST: usize = 64;
        let _printing = print::begin();
        for _ in 0..MOST {
            let mut reply = Vec::new();
            let asked = self.with_lane(|lane| {
                lane.send(own::PRINTED, true, [&[], &[]])?;
                let code = lane.receive(&mut reply, false)?;
                lane.printed();
                Ok(code)
            });
            let mut reader = Reader(&reply);
            let (Ok(0), Ok(to), Ok(len)) = (asked, reader.word(), reader.word()) else { return };
            let Ok(bytes) = reader.bytes(len as usize) else { return };
            print::print(to, bytes);
        }
    }

    /// Sends a call, and waits for its answer, no longer than a call may take where it does not wait for the device.
    pub(crate) fn ask(self: &Arc<Self>, call: usize, payload: &[u8], waits: bool) -> Result<Vec<u8>, u32> {
        self.ask_bulk(call, [payload, &[]], waits)
    }

    /// Sends the parts of a copy of `whole` bytes, some ahead of their answers but for the first, which waits for what is before all of them. Each has a
    /// place for its answer.
    pub(crate) fn ask_many<'a>(
        self: &Arc<Self>,
        call: usize,
        whole: usize,
        calls: impl Iterator<Item = (Vec<u8>, &'a mut [u8])>,
    ) -> Result<(), u32> {
        let (mut open, mut result) = (VecDeque::new(), 0);
        let finish = |lane: &mut Lane, open: &mut VecDeque<&'a mut [u8]>, result: &mut u32| {
            let Some(to) = open.pop_front() else { return Ok(()) };
            let code = lane.receive_in(to, whole)?;
            *result = if *result == 0 { code } else { *result };
            Ok::<_, io::Error>(())
        };
        let printed = self.with_lane(|lane| {
            for (at, (payload, to)) in calls.enumerate() {
                if open.len() == PLACES || at == 1 {
                    finish(lane, &mut open, &mut result)?;
                }
                if result != 0 {
                    break;
                }
                lane.send(call as u16, true, [&payload, &[]])?;
                open.push_back(to);
            }
            while !open.is_empty() {
                finish(lane, &mut open, &mut result)?;
            }
            Ok(lane.printed())
        })?;
        if printed {
            self.print();
        }
        if result == 0 { Ok(()) } else { Err(result) }
    }
}

/// Why the server has ended the session, if it has said so.
fn last_word(control: &mut Connection) -> Option<u32> {
    /// It is on its way already, over whatever is between.
    const LATE: Duration = Duration::from_secs(5);
    control.set_read_timeout(Some(LATE)).ok()?;
    // An answer may be before it that nobody has waited for.
    let mut words = (0..4).map_while(|_| control.word().ok());
    words.find(|word| word & control::ENDED != 0).map(|word| word as u32)
}

/// The window, if there is one.
fn window(place: &Place) -> Option<Arc<Window>> {
    let opened = match (std::env::var_os("VM_BRIDGE_WINDOW"), place.device()) {
        (Some(path), _) => Window::open(Path::new(&path)),
        (None, Some(device)) => {
            Window::of_device(&device.window_file(), device.window_address(), device.config().window_bytes)
        }
        (None, None) => return None,
    };
    match opened {
        Ok(window) => {
            say::quietly(&format!("the window is {window}"));
            Some(Arc::new(window))
        }
        Err(error) => {
            say::once(&format!("the window can't be opened: {error}; memory of the host is copied"));
            None
        }
    }
}

/// A thread's lane.
struct Lane {
    client: Arc<Client>,
    way: ManuallyDrop<Way>,
    /// Has an answer said that something was printed?
    printed: bool,
}

impl Drop for Lane {
    fn drop(&mut self) {
        // In a child it is still the parent's, whose it would end.
        if fork::generation() != self.client.generation {
            return;
        }
        let closing = match &mut *self.way {
            Way::Ring { ring, part: Some(offset) } => ring.close().map(|stream| (stream, *offset)),
            _ => None,
        };
        fork::end(&mut self.way);
        // The server may go on with calls that were not waited for.
        locked(&self.client.closing).extend(closing);
    }
}

/// How its calls go.
enum Way {
    Ring {
        ring: Near,
        /// Where in the window it is.
        part: Option<u64>,
    },
    Stream {
        stream: Connection,
        is_patient: bool,
        buffer: Vec<u8>,
    },
}

impl Lane {
    fn new(client: &Arc<Client>) -> Result<Self, u32> {
        let streams = std::env::var_os("VM_BRIDGE_STREAM").is_some();
        let in_window = if streams { None } else { client.lane_in_window() };
        let way = if let Some((ring, offset)) = in_window {
            Way::Ring { ring, part: Some(offset) }
        } else if client.token.is_some() || streams {
            let stream = client.open(control::LANE)?;
            stream.set_read_timeout(Some(PATIENCE)).map_err(|_| code::OUT_OF_MEMORY)?;
            Way::Stream { stream, is_patient: false, buffer: Vec::new() }
        } else {
            let (ring, file) = Near::make().map_err(|_| code::OUT_OF_MEMORY)?;
            client.order([control::RING, 0, 0, 0], Some(file.as_fd()))?;
            Way::Ring { ring, part: None }
        };
        Ok(Self { client: client.clone(), way: ManuallyDrop::new(way), printed: false })
    }

    fn send(&mut self, call: u16, asks: bool, parts: [&[u8]; 2]) -> io::Result<()> {
        let len = (parts[0].len() + parts[1].len()) as u32;
        let is_bulk = !parts[1].is_empty();
        // Taken last: the calls of other threads wait for what has a ticket.
        let ticket = self.client.tickets.fetch_add(1, Ordering::SeqCst);
        let header = Header { len, call, asks, is_bulk, ticket };
        counts::count(call, asks);
        match &mut *self.way {
            Way::Ring { ring, .. } => ring.send(header, parts, || self.client.is_gone()),
            Way::Stream { stream, buffer, .. } => {
                buffer.clear();
                buffer.extend_from_slice(&header.to_bytes());
                parts.iter().for_each(|part| buffer.extend_from_slice(part));
                stream.write_all(buffer)
            }
        }
    }

    /// A result without whether something was printed, which is kept.
    fn result(&mut self, code: u32) -> u32 {
        self.printed |= code & Answer::PRINTED != 0;
        code & !Answer::PRINTED
    }

    /// Has an answer since the last time said that something was printed?
    fn printed(&mut self) -> bool {
        std::mem::take(&mut self.printed)
    }

    fn receive(&mut self, reply: &mut Vec<u8>, waits: bool) -> io::Result<u32> {
        // What waits for the device waits as long as that takes; a server that ends ends it.
        let timeout = if waits { None } else { Some(PATIENCE) };
        let code = match &mut *self.way {
            Way::Ring { ring, .. } => ring.receive(reply, timeout, || self.client.is_gone())?,
            Way::Stream { stream, is_patient, .. } => {
                if waits != *is_patient {
                    stream.set_read_timeout(timeout)?;
                    *is_patient = waits;
                }
                let mut head = [0; Answer::SIZE];
                stream.read_exact(&mut head)?;
                let answer = Answer::from_bytes(head).map_err(io::Error::other)?;
                reply.resize(answer.len as usize, 0);
                stream.read_exact(reply)?;
                answer.code
            }
        };
        Ok(self.result(code))
    }

    /// The answer of a call that waits for the device, with its payload in `to`, which is a part of `whole` bytes.
    fn receive_in(&mut self, to: &mut [u8], whole: usize) -> io::Result<u32> {
        if let Way::Ring { ring, .. } = &mut *self.way {
            let code = ring.receive_in(to, whole, None, || self.client.is_gone())?;
            return Ok(self.result(code));
        }
        let mut reply = Vec::new();
        let code = self.receive(&mut reply, true)?;
        let len = to.len().min(reply.len());
        to[..len].copy_from_slice(&reply[..len]);
        Ok(code)
    }
}
