//! A lane: the calls of a thread of the program, made by a thread of the server.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use vm_cuda_api::names::is_per_thread;
use vm_cuda_api::{FUNCTIONS, Function, Item, Kind, Object, Way};

use super::deadline::{Marks, Pending};
use super::edges;
use super::effects::{self, Effect};
use super::host::{Image, NODE};
use super::pack::{self, Refused};
use super::reach::Checked;
use super::session::{Claim, Session, SessionError};
use super::sys::{self, Word};
use super::{facts, hand, nodes, nvml, prints};
use crate::calls::{MODES, Mode};
use crate::orders;
use crate::recording::Recorder;
use crate::ring::{Far, Taken};
use crate::wire::nvml::{MOST, Question};
use crate::wire::{
    Answer, Header, IMAGE, Malformed, PAYLOAD, Reader, VERSION, code, control, own, put, put_bytes,
};

/// Serves a program: until its connection ends.
///
/// # Errors
/// When the connection fails, or what comes is not what a program sends.
pub fn serve(connection: &UnixStream, session: &Arc<Session>) -> Result<(), SessionError> {
    session.connect(connection.try_clone()?);
    if let Some(watch) = session.watch() {
        watch.start(session);
    }
    let result = orders(connection, session);
    session.end();
    result
}

fn orders(connection: &UnixStream, session: &Arc<Session>) -> Result<(), SessionError> {
    let mut has_asked = false;
    while let Some((order, [file, more])) = orders::receive(connection)? {
        let (mut answer, mut more_bytes) = (Vec::new(), Vec::new());
        let result = match (order, file, more) {
            ([control::HELLO, version, ..], None, None) if version == u64::from(VERSION) => 0,
            ([control::HELLO, ..], None, None) => code::NOT_SUPPORTED,
            ([control::LANE, ..], Some(file), None) => {
                start(session, Stream::new(UnixStream::from(file), session.watch().is_some()))
            }
            ([control::RING, _, 0, _], Some(file), None) => start_ring(session, Far::open(&file), None),
            ([control::RING, _, len, offset], Some(window), Some(stream)) => {
                let claim = session.claim(offset, len);
                start_ring(session, Far::within(&window, offset, len, stream.into()), Some(claim))
            }
            ([control::GIVE, offset, len, _], None, None) => session.release(offset, len),
            ([control::VARIABLE, name, len, _], None, None) if len <= control::VALUE as u64 => {
                more_bytes.resize(len as usize, 0);
                (&*connection).read_exact(&mut more_bytes)?;
                let name = *control::VARIABLES.get(name as usize).ok_or(Malformed)?;
                sys::set_variable(name, &more_bytes).err().unwrap_or(0)
            }
            ([control::CALLBACKS, ..], Some(file), None) => {
                session.callbacks().open(UnixStream::from(file));
                0
            }
            ([control::WINDOW, at, len, offset], Some(file), None) => {
                session.map(at, len, offset, &file).err().unwrap_or(0)
            }
            ([control::FACTS, ..], None, None) => facts::facts(session)
                .map_or_else(|code| code, |facts| with_length(&facts.to_bytes(), &mut answer)),
            ([control::NVML, len, ..], None, None) if len <= MOST as u64 => {
                more_bytes.resize(len as usize, 0);
                (&*connection).read_exact(&mut more_bytes)?;
                let answered = nvml::ask(session, &mut Question::from_bytes(&more_bytes)?);
                has_asked = true;
                answered.map_or_else(|code| code, |bytes| with_length(&bytes, &mut answer))
            }
            ([control::FORGET, first, second, _], None, None) => {
                session.quota().forget([first, second]);
                session.sharing().map_or(0, |sharing| sharing.forget([first, second]).err().unwrap_or(0))
            }
            ([control::MEMORY, first, second, alone], None, None) => {
                has_asked |= alone == 1;
                let memory = facts::memory(session, [first, second]);
                memory.iter().flatten().for_each(|word| put(&mut answer, *word));
                memory.err().unwrap_or(0)
            }
            // Linux dropped a file: this process may open no more.
            ([control::LANE | control::RING | control::CALLBACKS | control::WINDOW, ..], _, None) => {
                code::OUT_OF_MEMORY
            }
            _ => return Err(Malformed.into()),
        };
        // What NVML says is no matter of another driver's.
        if let (Some(recorder), 0, false) = (session.recorder(), result, order[0] == control::NVML) {
            recorder.order(order, &more_bytes);
        }
        (&*connection).write_all(&[&u64::from(result).to_ne_bytes(), &answer[..]].concat())?;
        if has_asked && session.is_empty() && !nvml::asks_more(connection)? {
            break;
        }
    }
    Ok(())
}

/// Answers with bytes, and how many these are.
fn with_length(bytes: &[u8], answer: &mut Vec<u8>) -> u32 {
    put(answer, bytes.len() as u64);
    put_bytes(answer, bytes);
    0
}

/// Starts a lane in memory, if it is one.
fn start_ring(session: &Arc<Session>, ring: io::Result<Far>, claim: Option<Claim>) -> u32 {
    match ring {
        Ok(ring) => start(session, Ring { ring, claim, stream: None, session: session.clone() }),
        Err(_) => code::INVALID_VALUE,
    }
}

/// Starts a lane.
fn start(session: &Arc<Session>, mut transport: impl Transport + Send + 'static) -> u32 {
    if !session.enter() {
        return code::OUT_OF_MEMORY;
    }
    let Ok(charge) = session.host().take(MEMORY) else {
        session.leave();
        return code::OUT_OF_MEMORY;
    };
    let of = session.clone();
    let lane = move || {
        let _charge = charge;
        if let Err(error) = Lane::new(of.clone()).run(&mut transport) {
            tracing::warn!(%error, "a lane of a CUDA program failed, and its session ends");
            of.end();
        }
        of.leave();
    };
    match std::thread::Builder::new().name("lane".into()).spawn(lane) {
        Ok(_) => 0,
        Err(_) => {
            session.leave();
            code::OUT_OF_MEMORY
        }
    }
}

/// The most memory of a lane: a request, an answer, a read buffer and a stack.
const MEMORY: u64 = 2 * PAYLOAD as u64 + BUFFER as u64 + (64 << 10);

/// Copies of so many bytes are from memory that is registered.
pub(super) const PINNED: usize = 128 << 10;

/// Bytes of a request, for a copy. It lives until the call has returned.
pub(super) struct Source {
    pub(super) place: u64,
    /// Whether the stream must be waited for before the next request.
    pub(super) waits: bool,
    _bytes: Vec<u8>,
}

/// How requests come and answers go.
pub(super) trait Transport {
    /// The next request, its payload in `payload`, but bytes for the driver that stay where they are; `None` when there are no more.
    /// While none comes the lane is `idle` after a `nap`, then now and then.
    fn receive(
        &mut self,
        payload: &mut Vec<u8>,
        nap: Duration,
        idle: &dyn Fn(),
    ) -> Result<Option<Taken>, SessionError>;
    /// Sends an answer.
    fn answer(&mut self, code: u32, payload: &[u8]) -> Result<(), SessionError>;
    /// Where the payload of the next answer may be written, to be answered [there](Self::answer_there).
    fn room(&self) -> Option<u64> {
        None
    }
    /// The memory of all requests and answers, and its length, if the driver can register it.
    fn pinnable(&self) -> Option<(u64, u64)> {
        None
    }
    /// Keeps that memory after the lane's end: the driver may still have it pinned.
    fn keep_pinned(&mut self) {}
    /// Sends an answer of so many bytes that are in their room.
    fn answer_there(&mut self, code: u32, _len: usize) -> Result<(), SessionError> {
        self.answer(code, &[])
    }
}

/// A lane on a stream of bytes.
struct Stream {
    stream: UnixStream,
    buffer: Vec<u8>,
    read: usize,
    filled: usize,
    /// Is it idle now and then?
    watched: bool,
    nap: Duration,
}

/// How long nothing comes before a lane is idle, and where something has to be seen soon.
const IDLE: Duration = Duration::from_millis(100);
const NAP: Duration = Duration::from_millis(1);
/// Bytes that are read at once.
const BUFFER: usize = 64 << 10;

impl Stream {
    fn new(stream: UnixStream, watched: bool) -> Self {
        Self { stream, buffer: vec![0; BUFFER], read: 0, filled: 0, watched, nap: Duration::ZERO }
    }

    /// Reads no longer than so at once, where what is put on a stream has to be seen.
    fn nap(&mut self, nap: Duration) -> io::Result<()> {
        if self.nap != nap {
            self.stream.set_read_timeout(Some(nap))?;
            self.nap = nap;
        }
        Ok(())
    }

    /// Fills `to`; no when the stream ends before its first byte.
    fn fill(&mut self, to: &mut [u8], idle: &dyn Fn()) -> io::Result<bool> {
        let mut done = 0;
        while done < to.len() {
            if self.read == self.filled {
                let rest = &mut to[done..];
                // What is large is not read twice.
                let large = rest.len() >= BUFFER;
                let len = self.stream.read(if large { rest } else { &mut self.buffer });
                match len {
                    Ok(0) if done == 0 => return Ok(false),
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(len) if large => done += len,
                    Ok(len) => (self.read, self.filled) = (0, len),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        idle();
                        self.nap(IDLE)?;
                    }
                    Err(error) => return Err(error),
                }
                continue;
            }
            let len = (self.filled - self.read).min(to.len() - done);
            to[done..done + len].copy_from_slice(&self.buffer[self.read..self.read + len]);
            self.read += len;
            done += len;
        }
        Ok(true)
    }
}

impl Transport for Stream {
    fn receive(
        &mut self,
        payload: &mut Vec<u8>,
        nap: Duration,
        idle: &dyn Fn(),
    ) -> Result<Option<Taken>, SessionError> {
        if self.watched {
            self.nap(nap)?;
        }
        let mut bytes = [0; Header::SIZE];
        if !self.fill(&mut bytes, idle)? {
            return Ok(None);
        }
        let header = Header::from_bytes(bytes)?;
        payload.resize(header.len as usize, 0);
        if !payload.is_empty() && !self.fill(payload, idle)? {
            return Err(Malformed.into());
        }
        Ok(Some(Taken { header, bulk: None }))
    }

    fn answer(&mut self, code: u32, payload: &[u8]) -> Result<(), SessionError> {
        let answer = Answer { len: payload.len() as u32, code }.to_bytes();
        if payload.len() < BUFFER {
            Ok(self.stream.write_all(&[&answer, payload].concat())?)
        } else {
            self.stream.write_all(&answer)?;
            Ok(self.stream.write_all(payload)?)
        }
    }
}

/// A lane in memory. The order of its fields is that of its end: the memory is unmapped, it is no longer claimed, and the program sees that.
struct Ring {
    ring: Far,
    /// Where it is a part of the window.
    claim: Option<Claim>,
    stream: Option<UnixStream>,
    session: Arc<Session>,
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.stream = self.ring.close();
    }
}

impl Transport for Ring {
    fn receive(
        &mut self,
        payload: &mut Vec<u8>,
        nap: Duration,
        idle: &dyn Fn(),
    ) -> Result<Option<Taken>, SessionError> {
        let waited = Cell::new(false);
        let has_ended = || {
            if waited.replace(true) {
                idle();
            }
            self.session.has_ended()
        };
        self.ring.nap(nap);
        Ok(self.ring.take(payload, has_ended)?)
    }

    fn answer(&mut self, code: u32, payload: &[u8]) -> Result<(), SessionError> {
        self.ring.answer(code, payload);
        Ok(())
    }

    fn room(&self) -> Option<u64> {
        Some(self.ring.room())
    }

    fn pinnable(&self) -> Option<(u64, u64)> {
        Some(self.ring.pinnable())
    }

    fn keep_pinned(&mut self) {
        self.claim.take().into_iter().for_each(Claim::leak);
    }

    fn answer_there(&mut self, code: u32, len: usize) -> Result<(), SessionError> {
        self.ring.answer_there(code, len);
        Ok(())
    }
}

/// The calls of a thread.
#[derive(Debug)]
pub struct Lane {
    session: Arc<Session>,
    /// Its number in the recording.
    number: u64,
    /// What it marks streams by, where there is a deadline or a time slice.
    marks: Option<Marks>,
    /// Its number among the session's.
    thread: u64,
    /// An image that comes in parts, for the call behind them.
    pub(super) image: Image,
    /// What a call made that the program fetches in parts.
    pub(super) made: Image,
    /// Parameters of a launch; kept for the next.
    pub(super) memory: Vec<u64>,
    /// Where the answer's payload may be written.
    pub(super) room: Option<u64>,
    /// How many bytes of it were written there.
    pub(super) there: Option<usize>,
    /// The memory of requests and answers that the driver can register.
    pinnable: Option<(u64, u64)>,
    /// The driver's result of registering them. `None` before the attempt.
    pinned: Option<u32>,
}

/// Returns whether a call makes an object that is charged to the budget: a handle, a range of addresses, a function of the program.
fn grows(number: usize) -> bool {
    static GROWS: LazyLock<Vec<bool>> = LazyLock::new(|| {
        const OTHERS: [&str; 8] = [
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemAlloc",
            "cuLaunchHostFunc",
            "cuStreamAddCallback",
            "cuIpcOpenMemHandle",
            "cuGraph",
            "cuLinkAddData",
        ];
        let grows = |function: &Function| {
            let name = &function.name;
            let others = ["Get", "Pop", "EndCapture", "Destroy", "Release", "cuGraphLaunch"];
            let is_none = others.iter().any(|word| name.contains(word));
            !is_none && (returns_handle(function) || OTHERS.iter().any(|begin| name.starts_with(begin)))
        };
        select(grows)
    });
    GROWS.get(number).copied().unwrap_or(false)
}

/// Returns, for each function by its number, whether it is one of a kind.
fn select(is_one: impl Fn(&Function) -> bool) -> Vec<bool> {
    FUNCTIONS.iter().map(is_one).collect()
}

/// Returns whether a function returns a handle in one of its parameters.
fn returns_handle(function: &Function) -> bool {
    function.parameters.iter().any(|parameter| {
        matches!(parameter.kind, Kind::Pointer { way: Way::Out | Way::InOut, item: Item::Handle(_), .. })
    })
}

/// Returns whether a call copies and has ended when it returns.
fn copies(number: usize) -> bool {
    static COPIES: LazyLock<Vec<bool>> =
        LazyLock::new(|| select(|of| of.name.starts_with("cuMemcpy") && !of.name.contains("Async")));
    COPIES.get(number).is_some_and(|copies| *copies)
}

/// Returns whether a call ends an object. One that returns a handle makes one: `cuGraphAddMemFreeNode`.
fn ends(number: usize) -> bool {
    const WORDS: [&str; 6] = ["Free", "Destroy", "Unload", "Release", "Unmap", "Unregister"];
    static ENDS: LazyLock<Vec<bool>> =
        LazyLock::new(|| select(|of| !returns_handle(of) && WORDS.iter().any(|word| of.name.contains(word))));
    ENDS.get(number).is_some_and(|ends| *ends)
}

/// Returns whether a call must not return the deferred error of an earlier call: it returns the name of an error, or printed text.
fn names_errors(number: usize) -> bool {
    static NUMBERS: LazyLock<[Option<usize>; 2]> =
        LazyLock::new(|| ["cuGetErrorName", "cuGetErrorString"].map(vm_cuda_api::number));
    number == usize::from(own::PRINTED) || NUMBERS.contains(&Some(number))
}

/// A call whose turn it is.
pub(super) struct Call<'a> {
    pub(super) session: &'a Session,
    ticket: u64,
    passed: bool,
    /// Is its answer waited for?
    pub(super) asks: bool,
    /// The function's number.
    pub(super) number: usize,
    /// Where its bytes for the driver are, where they are not in its payload.
    pub(super) bulk: Option<(u64, usize)>,
}

impl Call<'_> {
    /// Makes the program's call and returns the driver's result.
    ///
    /// # Errors
    /// If the call reaches memory that the program does not have.
    pub(super) fn make(&self, words: &[Word], memory: &mut [u64]) -> Result<u32, u32> {
        Ok(self.session.driver().make(Checked::new(self.session, self.number, words)?, memory))
    }

    /// Lets the calls behind it go on.
    pub(super) fn pass(&mut self) {
        if !self.passed {
            self.passed = true;
            self.session.turn.pass(self.ticket);
        }
    }

    /// Waits for a stream, as this call's form means it, while the calls behind go on: what the driver says.
    pub(super) fn wait_for(&mut self, stream: u64) -> u32 {
        self.pass();
        let per_thread = is_per_thread(&FUNCTIONS[self.number].name);
        let name = if per_thread { "cuStreamSynchronize_ptsz" } else { "cuStreamSynchronize" };
        self.session.driver().named(name, &[Word::Is(stream)], &mut [])
    }
}

impl Lane {
    /// A lane of a session.
    #[must_use]
    pub fn new(session: Arc<Session>) -> Self {
        let number = session.recorder().map_or(0, Recorder::lane);
        Self {
            marks: session.watch().cloned().map(Marks::new),
            image: Image::new(session.host()),
            made: Image::new(session.host()),
            thread: session.untold().thread(),
            session,
            number,
            memory: Vec::new(),
            room: None,
            there: None,
            pinnable: None,
            pinned: None,
        }
    }

    fn run(&mut self, transport: &mut dyn Transport) -> Result<(), SessionError> {
        self.pinnable = transport.pinnable();
        let result = self.serve_all(transport);
        self.session.untold().end(self.thread);
        if let Some(marks) = &self.marks {
            marks.end(&self.session);
        }
        if let (Some((at, _)), Some(0)) = (self.pinnable, self.pinned) {
            let result = self.session.driver().named("cuMemHostUnregister", &[Word::Is(at)], &mut []);
            if result != 0 {
                transport.keep_pinned();
            }
        }
        result
    }

    fn serve_all(&mut self, transport: &mut dyn Transport) -> Result<(), SessionError> {
        let (mut payload, mut reply) = (Vec::new(), Vec::new());
        loop {
            let idle = || {
                if let Some(marks) = &self.marks {
                    marks.idle(&self.session);
                }
            };
            let nap = if self.marks.as_ref().is_some_and(Marks::is_unseen) { NAP } else { IDLE };
            let Some(taken) = transport.receive(&mut payload, nap, &idle)? else { break };
            self.room = transport.room();
            let number = usize::from(taken.header.call);
            if let Some(code) = self.serve(taken, &payload, &mut reply)? {
                let code = self.with_prints(number, code);
                match self.there.take() {
                    Some(len) => transport.answer_there(code, len)?,
                    None => transport.answer(code, &reply)?,
                }
            }
        }
        Ok(())
    }

    /// A result, with whether something was printed.
    fn with_prints(&self, number: usize, code: u32) -> u32 {
        let Some(prints) = self.session.prints() else { return code };
        if prints::flushes(number) {
            prints.look();
        }
        if prints.has_any() { code | Answer::PRINTED } else { code }
    }

    /// Makes a call. The result is what is answered, where an answer is waited for.
    ///
    /// # Errors
    /// When it is no call, or not its turn.
    pub fn serve(
        &mut self,
        Taken { header, bulk }: Taken,
        payload: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<Option<u32>, Malformed> {
        reply.clear();
        self.there = None;
        let session = self.session.clone();
        session.turn.wait(header.ticket).map_err(|_| Malformed)?;
        let number = usize::from(header.call);
        let mut call =
            Call { session: &session, ticket: header.ticket, passed: false, asks: header.asks, number, bulk };
        let result = self.make(&mut call, payload, reply);
        if let (false, Ok(code @ 1..) | Err(Refused::Code(code))) = (header.asks, &result) {
            // Before the next call of any thread.
            session.untold().keep(self.thread, *code, !ends(number));
        }
        call.pass();
        if !matches!(header.call, own::IMAGE | own::PRINTED) && !self.image.bytes.is_empty() {
            // This call had no use for it, and the next must not take it for its own.
            self.image.take();
        }
        let result = match result {
            Ok(code) => code,
            Err(Refused::Code(code)) => {
                reply.clear();
                code
            }
            Err(Refused::Malformed) => return Err(Malformed),
        };
        // Who replays it has another's prints, if any.
        if let Some(recorder) = session.recorder().filter(|_| header.call != own::PRINTED) {
            let bulk = bulk.map(|(at, len)| sys::bytes(at, len)).unwrap_or_default();
            let reply = match self.there {
                Some(len) => &vec![0; len],
                None => &*reply,
            };
            recorder.call(self.number, header, [payload, &bulk], (result, reply));
        }
        Ok(header.asks.then_some(result))
    }

    fn make(&mut self, call: &mut Call<'_>, payload: &[u8], reply: &mut Vec<u8>) -> Result<u32, Refused> {
        let mode = match FUNCTIONS.get(call.number) {
            Some(_) => MODES[call.number],
            None if (own::LAYOUT..=own::PRINTED).contains(&(call.number as u16)) => Mode::Hand,
            None => return Err(Refused::Malformed),
        };
        // What was not waited for and failed is told here, in the place of what this call would have said.
        let tells = call.asks && mode != Mode::Kept && !names_errors(call.number);
        let waits = mode == Mode::Waits || copies(call.number);
        // What waits is made all the same, and so is what ends an object: nobody would end it again.
        if tells && mode != Mode::Waits && !ends(call.number) {
            let code = call.session.untold().tell(self.thread, waits);
            if code != 0 {
                return Ok(code);
            }
        }
        if matches!(mode, Mode::Unsupported | Mode::Here) {
            return Err(code::NOT_SUPPORTED.into());
        }
        if grows(call.number) {
            call.session.host().check()?;
        }
        if let (Some((effect, _)), true) = (effects::of(call.number), call.session.may_capture()) {
            let graph = if effect == Effect::LaunchesGraph { Reader(payload).word()? } else { 0 };
            let more = call.session.handles().held(Object::Exec, graph);
            let edges = edges::of_capture(call.session, call.number, payload);
            let parameters = nodes::of_launch(call, effect, payload);
            call.session.record(NODE + payload.len() as u64 + parameters + more + edges)?;
            if effect == Effect::LaunchesGraph && call.session.is_recorded() {
                let mut reader = Reader(payload);
                let stream = reader.word().and_then(|_| reader.word())?;
                let stream = call.session.handles().real(Object::Stream, stream)?;
                if hand::records(call, stream) {
                    call.session.handles().capture_references(graph);
                }
            }
        }
        let pending = match &mut self.marks {
            Some(marks) => marks.before(call.session, call.number, payload)?,
            None => Pending::Nothing,
        };
        if mode == Mode::Waits {
            call.pass();
        }
        let result = hand::make(self, call, payload, reply)
            .unwrap_or_else(|| pack::make(call.session, call.number, payload, reply));
        if let Some(marks) = &mut self.marks {
            marks.after(call.session, pending, result.as_ref().ok().copied(), reply);
        }
        let result = result?;
        if let Some((Effect::Waits(_), _)) = effects::of(call.number) {
            // The stream now depends on what the event depends on.
            let edges = edges::of_capture(call.session, call.number, payload);
            call.session.record_more(call.session.host().charge(edges));
        }
        let failed = call.session.staged().failed.load(Ordering::SeqCst);
        if tells && result == 0 && failed != 0 {
            self.there = None;
            return Ok(failed);
        }
        let code = if tells { call.session.untold().tell(self.thread, waits) } else { 0 };
        if code != 0 {
            self.there = None;
        }
        Ok(if code == 0 { result } else { code })
    }

    /// Registers the lane's memory with the driver, once: the device then reads and writes it itself. Where that fails the driver stages its copies.
    pub(super) fn pin(&mut self, session: &Session) {
        const PORTABLE: u64 = 1;
        if let (Some((at, len)), None) = (self.pinnable, self.pinned) {
            let words = [Word::Is(at), Word::Is(len), Word::Is(PORTABLE)];
            let result = session.relaxed(|driver| driver.named("cuMemHostRegister_v2", &words, &mut []));
            tracing::debug!(result, "the memory of a lane is registered");
            self.pinned = Some(result);
        }
    }

    /// Where the driver reads bytes of a request for a copy, in a stream or not. The next request may overwrite them, and the driver reads registered
    /// memory only when the stream comes to it: few bytes are copied, which takes less than the device's reading of them, and a copy of many is waited
    /// for, as the driver itself may do.
    pub(super) fn source(&mut self, call: &Call<'_>, (place, len): (u64, usize), in_stream: bool) -> Source {
        if len >= PINNED {
            self.pin(call.session);
        }
        let is_pinned = call.bulk.is_some() && self.pinned == Some(0);
        let bytes = if is_pinned && len < PINNED { sys::bytes(place, len) } else { Vec::new() };
        let place = if bytes.is_empty() { place } else { sys::place(&bytes) };
        Source { place, waits: in_stream && is_pinned && len >= PINNED, _bytes: bytes }
    }

    /// Takes a part of an image.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<u32, Refused> {
        self.image.append(bytes, IMAGE)?;
        Ok(0)
    }
}
