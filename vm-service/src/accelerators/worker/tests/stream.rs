//! Programs at the other end of a socket, with the client that they use, and without.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use vm_paravirt::{CONFIG_BYTES, Config, FRAME_BYTES, FrameHeader};
use vm_paravirt_guest::linux::{Part, Stream as Client, Window};
use vm_paravirt_guest::{Error, Transport as _};

use super::*;
use crate::accelerators::worker::stream::Stream;

const WINDOW: u64 = 1 << 20;
/// How long the worker waits for slow programs here.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A guest whose programs connect to one worker.
struct Host {
    worker: Worker<FakeAccelerator>,
    guest: Guest,
    config: Config,
    file: File,
    meter: Meter,
    breaks: Receiver<String>,
}

impl Host {
    fn new() -> Self {
        Self::with(Arc::new(FakeAccelerator::with_memory(4 << 20)), QUOTA)
    }

    fn with(device: Arc<FakeAccelerator>, memory: u64) -> Self {
        Self::of(device, &Open { memory, ..orders(Some(1)) })
    }

    fn of(device: Arc<FakeAccelerator>, open: &Open) -> Self {
        let memory = open.memory;
        let file = tempfile::tempfile().unwrap();
        file.set_len(WINDOW).unwrap();
        let parts = vec![OwnedFd::from(file.try_clone().unwrap())];
        let ram = Arc::new(Ram::new(&[(0, WINDOW)], parts).unwrap());
        let (broken, breaks) = channel();
        let options = backend::options(memory, Duration::from_micros(open.deadline_us));
        let worker = Worker::start(device, options).unwrap();
        let config = Config::new(memory, open.deadline_us).with_window(WINDOW, 1);
        let meter = Meter::new().unwrap();
        let kept = meter.try_clone().unwrap();
        let guest = Guest::new(open, ram, kept, Watch::default(), broken).unwrap();
        Self { worker, guest, config, file, meter, breaks }
    }

    /// A program's end of a socket, whose other end is served.
    fn connect(&self) -> (UnixStream, JoinHandle<Result<(), String>>) {
        self.connect_with(Compiler::Kernels(Arc::new(ByName)))
    }

    fn connect_with(&self, compiler: Compiler) -> (UnixStream, JoinHandle<Result<(), String>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        ours.set_write_timeout(Some(Duration::from_secs(120))).unwrap();
        let stream = Stream::with_timeout(theirs.into(), &self.config, TIMEOUT).unwrap();
        let (worker, guest) = (self.worker.clone(), self.guest.clone());
        let served = std::thread::spawn(move || serve(&worker, compiler, stream, &guest));
        (ours, served)
    }

    fn program(&self) -> Program {
        let accelerator = Client::new(self.connect().0.into()).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.file));
        Program { accelerator, window: Window::open(path, WINDOW).unwrap() }
    }
}

/// A program with the client.
struct Program {
    accelerator: Client,
    window: Window,
}

impl Program {
    fn run(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
    ) -> Result<Result<(), (usize, Status)>, Error> {
        let mut frame = self.accelerator.frame();
        let mut batch = frame.batch()?;
        fill(&mut batch)?;
        let bytes = batch.finish();
        let frame = self.accelerator.call(frame, bytes)?;
        Ok(frame.reply()?.check())
    }

    /// Does what another program's end makes room for, which is released after its socket was closed.
    fn once_released(&mut self, mut fill: impl FnMut(&mut BatchWriter<'_>) -> Result<(), NoRoom>) {
        let begin = Instant::now();
        loop {
            match self.run(&mut fill) {
                Ok(Ok(())) => return,
                Ok(Err((0, Status::Quota))) if begin.elapsed() < Duration::from_secs(120) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => panic!("{other:?} after {:?}", begin.elapsed()),
            }
        }
    }
}

fn batch(fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut batch = BatchWriter::new(&mut bytes).unwrap();
    fill(&mut batch).unwrap();
    let len = batch.finish();
    bytes.truncate(len);
    bytes
}

fn frame(tag: u32, room: u32, batch: &[u8]) -> Vec<u8> {
    [&FrameHeader { bytes: batch.len() as u32, room, tag }.encode()[..], batch].concat()
}

/// What the host says until it ends the stream: the replies with their tags.
fn replies(socket: &mut UnixStream) -> Vec<(u32, Status)> {
    let mut said = Vec::new();
    if let Err(error) = socket.read_to_end(&mut said) {
        // It ended while something that it will not read was under way.
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "the stream has no end");
    }
    let mut rest = &said[..];
    let mut found = Vec::new();
    while let Some((header, after)) = rest.split_first_chunk::<FRAME_BYTES>() {
        let header = FrameHeader::decode_reply(header).unwrap();
        let (reply, after) = after.split_at(header.bytes as usize);
        let reply = Reply::decode(reply).unwrap();
        let status = reply.check().map_or_else(|(_, status)| status, |()| Status::Ok);
        found.push((header.tag, status));
        rest = after;
    }
    assert!(rest.is_empty(), "a reply is cut off");
    found
}

fn greeting(socket: &mut UnixStream) -> Config {
    let mut bytes = [0; CONFIG_BYTES];
    socket.read_exact(&mut bytes).unwrap();
    Config::decode(&bytes).unwrap()
}

#[test]
fn a_program_works_on_its_window() {
    let host = Host::new();
    let mut program = host.program();
    assert_eq!(*program.accelerator.config(), host.config);
    let numbers: Vec<u8> = (0..1024u32).flat_map(u32::to_le_bytes).collect();
    let parts: Vec<Part> = (0..3).map(|_| program.window.take(0x1000).unwrap()).collect();
    parts[1].write(0, &numbers).unwrap();
    let ir = add_and_spin();
    let (input, output) = (parts[1].range(0, 0x1000).unwrap(), parts[2].range(0, 0x1000).unwrap());
    let done = program.run(|batch| {
        batch.create_module(7, &ir)?;
        batch.import_buffer(1, &[input])?;
        batch.import_buffer(2, &[output])?;
        let view = |buffer| Argument::view(buffer, 0, &[1024]);
        batch.launch(7, 0, [4, 1, 1], &[view(1)?, view(2)?, Argument::i32(5)])?;
        batch.fence()
    });
    assert_eq!(done, Ok(Ok(())));
    let mut got = vec![0; 0x1000];
    parts[2].read(0, &mut got).unwrap();
    let expect: Vec<u8> = (5..1029u32).flat_map(u32::to_le_bytes).collect();
    assert!(got == expect);
    // No part of it lies outside.
    assert_eq!(parts[2].write(0x1000 - 3, &[0; 4]), Err(Error::Window));
    assert_eq!(parts[2].read(u64::MAX, &mut [0; 4]), Err(Error::Window));
    let outside = Range { address: WINDOW - 0x1000, bytes: 0x1001 };
    assert_eq!(program.run(|batch| batch.import_buffer(3, &[outside])), Ok(Err((0, Status::Range))));
    // Another program has objects of its own.
    assert_eq!(host.program().run(|batch| batch.destroy_buffer(1)), Ok(Err((0, Status::NoSuch))));
}

/// Takes processor time.
fn compute(how_long: Duration) {
    let time =
        || Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime)).unwrap();
    let begin = time();
    while time() - begin < how_long {
        std::hint::spin_loop();
    }
}

/// Takes processor time for each module.
struct Slow;

/// How much.
const COMPILING: Duration = Duration::from_millis(20);

impl Compile for Slow {
    fn target(&self) -> &str {
        "slow"
    }

    fn compile(&self, module: &ValidModule) -> Result<Vec<Artifact>, String> {
        compute(COMPILING);
        ByName.compile(module)
    }
}

/// Says that it has begun, and computes on when it may end.
struct Large {
    begun: Sender<()>,
    may_end: Mutex<Receiver<()>>,
}

impl Compile for Large {
    fn target(&self) -> &str {
        "large"
    }

    fn compile(&self, module: &ValidModule) -> Result<Vec<Artifact>, String> {
        self.begun.send(()).unwrap();
        self.may_end.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
        compute(10 * COMPILING);
        ByName.compile(module)
    }
}

/// Another guest's launches complete meanwhile, and who compiles owes what that takes.
#[test]
fn a_guest_that_compiles_holds_up_no_other() {
    let device = Arc::new(FakeAccelerator::with_memory(4 << 20));
    let sliced = Open { time_slice_us: 10_000, ..orders(Some(1)) };
    let (first, second) = (Host::of(device.clone(), &sliced), Host::of(device, &orders(Some(1))));
    let (begun, begins) = channel();
    let (end, may_end) = channel();
    let (mut ours, _) =
        first.connect_with(Compiler::Kernels(Arc::new(Large { begun, may_end: Mutex::new(may_end) })));
    greeting(&mut ours);
    let ir = add_and_spin();
    ours.write_all(&frame(7, 4096, &batch(|batch| batch.create_module(1, &ir)))).unwrap();
    begins.recv_timeout(Duration::from_secs(20)).unwrap();

    let mut program = second.program();
    let launch = |batch: &mut BatchWriter<'_>| {
        batch.launch(1, 1, [1; 3], &[Argument::view(1, 0, &[1])?, Argument::i64(10)])?;
        batch.fence()
    };
    let done = program.run(|batch| {
        batch.create_module(1, &ir)?;
        batch.create_buffer(1, 4)?;
        launch(batch)
    });
    assert_eq!(done, Ok(Ok(())));
    (0..10).for_each(|_| assert_eq!(program.run(launch), Ok(Ok(()))));
    assert_eq!(second.meter.read().unwrap(), None, "who has no slice owes nothing");
    ours.set_nonblocking(true).unwrap();
    assert_eq!(ours.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);

    end.send(()).unwrap();
    ours.set_nonblocking(false).unwrap();
    ours.read_exact(&mut [0; FRAME_BYTES]).unwrap();
    // Two slices are kept at most.
    let owed = 10 * COMPILING - Duration::from_millis(20);
    let balance = first.meter.read().unwrap().unwrap().balance;
    assert!(balance <= -(owed.as_nanos() as i64), "{balance}");
}

#[test]
fn a_guest_that_only_creates_modules_is_paced() {
    const MODULES: u32 = 6;
    let memory = Arc::new(FakeAccelerator::with_memory(4 << 20));
    let host = Host::of(memory, &Open { time_slice_us: 10_000, ..orders(Some(1)) });
    let (ours, _) = host.connect_with(Compiler::Kernels(Arc::new(Slow)));
    let mut accelerator = Client::new(ours.into()).unwrap();
    let ir = add_and_spin();
    let begin = Instant::now();
    for module in 0..MODULES {
        let mut frame = accelerator.frame();
        let mut batch = frame.batch().unwrap();
        batch.create_module(module, &ir).unwrap();
        let bytes = batch.finish();
        accelerator.call(frame, bytes).unwrap().reply().unwrap().check().unwrap();
    }
    // A tenth of the time is the guest's. It has a slice at first, and what the last one takes is waited for by the next.
    let least = ((MODULES - 1) * COMPILING - Duration::from_millis(10)) * 10;
    assert!(begin.elapsed() >= least - Duration::from_millis(20), "{:?}", begin.elapsed());
}

#[test]
fn parts_of_the_window_have_one_taker_each() {
    let host = Host::new();
    let (first, second) = (host.program().window, host.program().window);
    let taken: Vec<Part> = [(&first, 5000), (&second, 1), (&first, 4096)]
        .map(|(window, bytes)| window.take(bytes).unwrap())
        .into();
    let places: Vec<(u64, u64)> = taken.iter().map(|part| (part.offset(), part.bytes())).collect();
    assert_eq!(places, [(0, 5000), (0x2000, 1), (0x3000, 4096)]);
    for none in [0, WINDOW, WINDOW - 0x4000 + 1, u64::MAX] {
        assert_eq!(second.take(none).unwrap_err(), Error::WindowFull, "{none}");
    }
    assert_eq!(second.take(WINDOW - 0x4000).unwrap().offset(), 0x4000);
    drop(taken);
    assert_eq!(second.take(WINDOW).unwrap().offset(), 0);
}

#[test]
fn many_batches_are_under_way_at_once() {
    let host = Host::new();
    let mut program = host.program();
    let mut waiting = Vec::new();
    // More than the socket holds, so that answers must be taken meanwhile.
    for _ in 0..3000 {
        let mut frame = program.accelerator.frame();
        let mut batch = frame.batch().unwrap();
        batch.query().unwrap();
        batch.fence().unwrap();
        let bytes = batch.finish();
        match program.accelerator.submit(frame, bytes) {
            Ok(number) => waiting.push(number),
            Err((Error::QueueFull, _)) => {
                let (number, frame) = program.accelerator.wait().unwrap();
                assert_eq!(frame.reply().unwrap().check(), Ok(()));
                waiting.retain(|other| *other != number);
            }
            Err((error, _)) => panic!("{error}"),
        }
    }
    while !waiting.is_empty() {
        let (number, frame) = program.accelerator.wait().unwrap();
        assert_eq!(frame.reply().unwrap().check(), Ok(()));
        let before = waiting.len();
        waiting.retain(|other| *other != number);
        assert_eq!(waiting.len(), before - 1);
    }
    assert_eq!(program.accelerator.wait().unwrap_err(), Error::Late, "none is under way");
}

#[test]
fn whichever_thread_ends_a_batch_they_end_in_order() {
    let long = Duration::from_millis(20);
    for polls in [[Duration::ZERO; 2], [long, Duration::ZERO], [Duration::ZERO, long], [long; 2]] {
        let mut host = Host::new();
        host.guest = host.guest.polling(polls);
        let mut program = host.program();
        let part = program.window.take(0x1000).unwrap();
        let range = part.range(0, 0x1000).unwrap();
        let prepared = program.run(|batch| {
            batch.create_module(1, &add_and_spin())?;
            batch.import_buffer(1, &[range])
        });
        assert_eq!(prepared, Ok(Ok(())));
        let add = |batch: &mut BatchWriter<'_>| {
            let view = |offset| Argument::view(1, offset, &[256]);
            batch.launch(1, 0, [1, 1, 1], &[view(0)?, view(2048)?, Argument::i32(1)])
        };
        // One at a time, with and without a fence.
        for round in 0..200 {
            let done = program.run(|batch| {
                add(batch)?;
                if round % 3 > 0 { batch.fence() } else { Ok(()) }
            });
            assert_eq!(done, Ok(Ok(())), "{polls:?}");
        }
        // What runs too long is reported by the fence behind it, and those behind that wait for it.
        let mut numbers = Vec::new();
        for number in 0..8 {
            let mut frame = program.accelerator.frame();
            let mut batch = frame.batch().unwrap();
            if number == 2 {
                let view = Argument::view(1, 0, &[1]).unwrap();
                batch.launch(1, 1, [1, 1, 1], &[view, Argument::i64(i64::MAX)]).unwrap();
            } else {
                add(&mut batch).unwrap();
            }
            if number != 2 {
                batch.fence().unwrap();
            }
            let bytes = batch.finish();
            numbers.push(program.accelerator.submit(frame, bytes).map_err(|(error, _)| error).unwrap());
        }
        let mut answers = Vec::new();
        for _ in 0..8 {
            let (number, frame) = program.accelerator.wait().unwrap();
            let place = numbers.iter().position(|one| *one == number).unwrap();
            answers.push((place, frame.reply().unwrap().check()));
        }
        // The one without a fence is answered before what it began has ended.
        let fenced: Vec<_> = answers.iter().copied().filter(|(place, _)| *place != 2).collect();
        let expect: Vec<_> = [0, 1, 3, 4, 5, 6, 7]
            .map(|place| (place, if place == 3 { Err((1, Status::Deadline)) } else { Ok(()) }))
            .into();
        assert_eq!(fenced, expect, "{polls:?}");
        assert!(answers.contains(&(2, Ok(()))));
    }
}

#[test]
fn what_is_no_frame_ends_its_stream_alone() {
    let host = Host::new();
    let mut neighbour = host.program();
    let query = batch(|batch| batch.query());
    let mut old = query.clone();
    old[4] = 9;
    let header = |bytes, room| FrameHeader { bytes, room, tag: 7 }.encode().to_vec();
    let refused = |status| vec![(7, status)];
    let mut reserved = frame(7, 64, &query);
    reserved[15] = 1;
    // What is sent, and what is answered before the end. The last word says whether the program then ends its side.
    type Case<'a> = (&'a str, Vec<u8>, Vec<(u32, Status)>, bool);
    let cases: Vec<Case<'_>> = vec![
        ("nothing", vec![], vec![], true),
        ("no length", header(0, 64), refused(Status::Malformed), false),
        ("a short one", header(8, 64), refused(Status::Malformed), false),
        ("a ragged one", header(20, 64), refused(Status::Malformed), false),
        ("a long one", header((1 << 20) + 8, 64), refused(Status::Malformed), false),
        ("the longest", header(u32::MAX - 7, 64), refused(Status::Malformed), false),
        ("no room", frame(7, 15, &query), refused(Status::Malformed), false),
        ("a reserved field", reserved, refused(Status::Malformed), false),
        ("a part of a header", header(64, 64)[..9].to_vec(), vec![], false),
        ("a header alone", header(64, 64), vec![], false),
        ("a part of a batch", frame(7, 4096, &query)[..24].to_vec(), vec![], false),
        ("a part of a batch, and an end", frame(7, 4096, &query)[..24].to_vec(), vec![], true),
        ("no batch", frame(7, 64, &[0; 64]), refused(Status::Malformed), true),
        ("another version", frame(7, 64, &old), refused(Status::Version), true),
        ("little room", frame(7, 24, &query), refused(Status::ReplyRoom), true),
        (
            "a bad batch and a good one",
            [frame(7, 64, &[1; 32]), frame(8, 4096, &query)].concat(),
            vec![(7, Status::Malformed), (8, Status::Ok)],
            true,
        ),
        (
            "a good batch and no frame",
            [frame(6, 4096, &query), header(1, 1), vec![0xff; 4096]].concat(),
            vec![(6, Status::Ok), (7, Status::Malformed)],
            false,
        ),
    ];
    for (name, bytes, expect, ends) in cases {
        println!("{name}");
        let (mut socket, served) = host.connect();
        assert_eq!(greeting(&mut socket), host.config);
        socket.write_all(&bytes).unwrap();
        if ends {
            socket.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let begin = Instant::now();
        assert_eq!(replies(&mut socket), expect, "{name}");
        assert!(begin.elapsed() < Duration::from_secs(120), "{name}: {:?}", begin.elapsed());
        assert_eq!(served.join().unwrap(), Ok(()), "{name}");
        assert_eq!(neighbour.run(|batch| batch.query()), Ok(Ok(())), "{name}");
    }
    assert!(host.breaks.try_recv().is_err(), "a bad program has broken the guest's worker");
}

#[test]
fn a_program_that_takes_no_answers_ends_alone() {
    let host = Host::new();
    let (mut socket, served) = host.connect();
    let query = frame(1, 1 << 20, &batch(|batch| (0..500).try_for_each(|_| batch.query())));
    // The host stops to read, and then to wait.
    socket.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    while socket.write_all(&query).is_ok() {}
    assert_eq!(served.join().unwrap(), Ok(()));
    assert_eq!(host.program().run(|batch| batch.query()), Ok(Ok(())));
}

#[test]
fn a_program_that_waits_is_waited_for() {
    let host = Host::new();
    let mut program = host.program();
    std::thread::sleep(2 * TIMEOUT);
    assert_eq!(program.run(|batch| batch.query()), Ok(Ok(())));
}

#[test]
fn what_a_program_leaves_is_released() {
    let host = Host::new();
    let ir = add_and_spin();
    for _ in 0..3 {
        let mut first = host.program();
        let all = Range { address: 0, bytes: WINDOW };
        assert_eq!(first.run(|batch| batch.create_module(1, &ir)), Ok(Ok(())));
        // What the round before left is released while this one begins.
        first.once_released(|batch| batch.create_buffer(1, QUOTA));
        first.once_released(|batch| batch.import_buffer(2, &[all]));
        let mut second = host.program();
        assert_eq!(second.run(|batch| batch.create_buffer(1, 1)), Ok(Err((0, Status::Quota))));
        assert_eq!(second.run(|batch| batch.import_buffer(1, &[all])), Ok(Err((0, Status::Quota))));
        // It dies while a kernel of its runs that has no end.
        let mut frame = first.accelerator.frame();
        let mut batch = frame.batch().unwrap();
        let view = Argument::view(2, 0, &[1]).unwrap();
        batch.launch(1, 1, [1; 3], &[view, Argument::i64(i64::MAX)]).unwrap();
        batch.fence().unwrap();
        let bytes = batch.finish();
        first.accelerator.submit(frame, bytes).map_err(|(error, _)| error).unwrap();
        drop(first);
        second.once_released(|batch| batch.create_buffer(1, QUOTA));
        second.once_released(|batch| batch.import_buffer(2, &[all]));
    }
    assert!(host.breaks.try_recv().is_err());
}

#[test]
fn what_programs_leave_behind_is_within_the_quota_too() {
    const MEMORY: u64 = 32 << 20;
    let device = Arc::new(FakeAccelerator::with_memory(1 << 30));
    let host = Host::with(device.clone(), MEMORY);
    // No freed memory serves the next program.
    for round in 0..16 {
        let mut program = host.program();
        program.once_released(|batch| batch.create_buffer(1, MEMORY - round * (2 << 20)));
        assert_eq!(program.run(|batch| batch.fence()), Ok(Ok(())));
        assert!(device.used() <= MEMORY + (64 << 20), "round {round}: {} bytes", device.used());
    }
}

#[test]
fn a_host_that_breaks_the_protocol_is_an_error() {
    let host = Host::new();
    let query = batch(|batch| batch.query());
    let answer = |tag, bytes: &[u8]| {
        [&FrameHeader { bytes: bytes.len() as u32, room: 0, tag }.encode()[..], bytes].concat()
    };
    let check = |name: &str, said: &[u8], expect: fn(&Error) -> bool| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&host.config.encode()).unwrap();
        theirs.write_all(said).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let mut client = Client::new(ours.into()).unwrap();
        let mut frame = vm_paravirt_guest::Frame::new(vec![0; 4096], vec![0; 64]);
        frame.request()[..query.len()].copy_from_slice(&query);
        client.offer(frame, query.len()).map_err(|(error, _)| error).unwrap();
        let ended = client.wait().map(|_| ()).unwrap_err();
        assert!(expect(&ended), "{name}: {ended:?}");
        // Nor is it asked again.
        assert_eq!(client.wait().map(|_| ()), Err(ended), "{name}");
    };
    check("an end", &[], |error| *error == Error::NeedsReset);
    check("half an answer", &answer(0, &[0; 32])[..40], |error| *error == Error::NeedsReset);
    check("a tag that it was not given", &answer(1, &[0; 32]), |error| matches!(error, Error::Transport(_)));
    check("the greatest tag", &answer(u32::MAX, &[0; 32]), |error| matches!(error, Error::Transport(_)));
    check("a long answer", &answer(0, &[0; 72]), |error| matches!(error, Error::Transport(_)));
    check("no frame", &[0xff; 64], |error| matches!(error, Error::Malformed(_)));
    for greeting in [&[0; CONFIG_BYTES][..], &host.config.encode()[..9], &[]] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(greeting).unwrap();
        drop(theirs);
        assert!(Client::new(ours.into()).is_err());
    }
}

/// Mutated streams: `PARAVIRT_FRAMES` frames, or a few that an ordinary run has time for.
#[test]
fn mutated_streams_do_no_harm() {
    const CANARY: u8 = 0xc5;
    let frames: usize = std::env::var("PARAVIRT_FRAMES")
        .map_or_else(|_| crate::sweep::count(20_000), |text| text.parse().unwrap());
    let host = Host::new();
    host.file.set_len(2 * WINDOW).unwrap();
    host.file.write_all_at(&[CANARY; WINDOW as usize], WINDOW).unwrap();
    let ir = add_and_spin();
    let view = |buffer, extent| Argument::view(buffer, 0, &[extent]);
    let seeds = [
        batch(|b| {
            b.create_module(1, &ir)?;
            b.create_buffer(1, 4096)?;
            b.import_buffer(2, &[page(4)])?;
            b.fence()
        }),
        batch(|b| {
            b.launch(1, 0, [1, 1, 1], &[view(2, 64)?, view(1, 64)?, Argument::i32(1)])?;
            b.fence()
        }),
        batch(|b| {
            b.copy((1, 0), (2, 0), 64)?;
            b.query()?;
            b.log()
        }),
    ];
    let mut rng = crate::sweep::random(11);
    let (mut sent, mut answered, mut slowest) = (0, 0, Duration::ZERO);
    let begin = Instant::now();
    while sent < frames {
        let (mut socket, served) = host.connect();
        greeting(&mut socket);
        let mut stream = Vec::new();
        for tag in 0..1 + rng.next_u32() % 32 {
            let batch = &seeds[(tag as usize + usize::from(rng.next_u32().is_multiple_of(8))) % seeds.len()];
            let mut bytes = frame(tag, 1 << 16, batch);
            sent += 1;
            if rng.next_u32().is_multiple_of(4) {
                let (random, at) = (rng.next_u32(), rng.next_u32() as usize % bytes.len());
                match random % 4 {
                    0 => bytes[at] = (random >> 8) as u8,
                    1 => bytes[at % FRAME_BYTES] ^= 1 << (random >> 8 & 7),
                    2 => bytes.truncate(at),
                    _ => bytes.extend_from_slice(&random.to_le_bytes()),
                }
            }
            stream.extend(bytes);
        }
        // The host may end it before it is all sent.
        let mut reader = socket.try_clone().unwrap();
        let reading = std::thread::spawn(move || replies(&mut reader).len());
        let start = Instant::now();
        let _ = socket.write_all(&stream);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        answered += reading.join().unwrap();
        assert_eq!(served.join().unwrap(), Ok(()));
        slowest = slowest.max(start.elapsed());
    }
    println!(
        "{sent} mutated frames in {:.1} s, {answered} answered, the slowest stream took {slowest:?}",
        begin.elapsed().as_secs_f64()
    );
    assert!(answered > sent / 8, "the mutations miss what they are for");
    assert!(host.breaks.try_recv().is_err(), "a mutated stream has broken the worker");
    let mut beside = vec![0; WINDOW as usize];
    host.file.read_exact_at(&mut beside, WINDOW).unwrap();
    assert!(beside.iter().all(|byte| *byte == CANARY), "memory outside of the window has changed");
    assert_eq!(host.program().run(|batch| batch.query()), Ok(Ok(())));
}
