//! Hosts that refuse, fail, and vanish: what a program hears of each, and that it goes on where it can.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vm_accel::{
    Accelerator as _, Artifact, Error, Memory, MemoryKind, Parameter, ParameterKind, Queue as _,
    QueueOptions, Session, Signature, WorkerOptions, arguments,
};
use vm_guest::{GuestAccelerator, GuestQueue};
use vm_ir::binary::{Lines, encode};
use vm_paravirt_guest::linux::{Stream, Window};
use vm_paravirt_guest::protocol::{
    Batch, Config, FRAME_BYTES, FrameHeader, Info, LogEntry, LogWriter, Operation, Range, ReplyWriter, Status,
};

const WINDOW: u64 = 8 << 20;
const MEMORY: u64 = 64 << 20;
const DEADLINE: Duration = Duration::from_secs(2);
/// How long a test waits for what comes.
const SOON: Duration = Duration::from_secs(20);

/// What the host does with an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Said {
    Done,
    Failed(Status, &'static str),
    /// It ends the stream.
    Cut,
    /// It answers nothing any more.
    Silent,
}

/// What a host was sent, and what it says to each.
type Script = dyn Fn(&Operation<'_>) -> Said + Send + Sync;

#[derive(Clone)]
struct Host {
    script: Arc<Script>,
    window: Arc<File>,
    /// The operations that it took, in a word each.
    taken: Arc<Mutex<Vec<String>>>,
}

impl Host {
    fn new(script: impl Fn(&Operation<'_>) -> Said + Send + Sync + 'static) -> Self {
        let window = tempfile::tempfile().unwrap();
        window.set_len(WINDOW).unwrap();
        Self { script: Arc::new(script), window: Arc::new(window), taken: Arc::default() }
    }

    fn accelerator(&self) -> GuestAccelerator {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&*self.window));
        let host = self.clone();
        let connect = move || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let host = host.clone();
            std::thread::spawn(move || host.serve(theirs));
            Stream::new(ours.into())
        };
        GuestAccelerator::over(Window::open(path, WINDOW).unwrap(), connect).unwrap()
    }

    fn queue(&self) -> GuestQueue {
        self.accelerator().open(&options()).unwrap()
    }

    fn taken(&self) -> Vec<String> {
        std::mem::take(&mut *self.taken.lock().unwrap())
    }

    /// Serves a stream until it or the test ends.
    fn serve(self, mut stream: UnixStream) -> Option<()> {
        let config = Config::new(MEMORY, DEADLINE.as_micros() as u64).with_window(WINDOW, 1);
        stream.write_all(&config.encode()).ok()?;
        let mut log = Vec::new();
        loop {
            let mut header = [0; FRAME_BYTES];
            stream.read_exact(&mut header).ok()?;
            let header = FrameHeader::decode_batch(&header).unwrap();
            let mut bytes = vec![0; header.bytes as usize];
            stream.read_exact(&mut bytes).ok()?;
            let mut reply = vec![0; header.room as usize];
            let mut writer = ReplyWriter::new(&mut reply, Status::Ok).unwrap();
            let mut failed = false;
            for operation in Batch::decode(&bytes).unwrap().operations() {
                let operation = operation.unwrap();
                if failed {
                    writer.result(Status::Skipped, &[]).unwrap();
                    continue;
                }
                let word = format!("{operation:?}");
                let word = word.split([' ', '(']).next().unwrap_or_default().to_owned();
                self.taken.lock().unwrap().push(word);
                match (self.script)(&operation) {
                    Said::Done => {
                        let answer = match operation {
                            Operation::Query => info(),
                            Operation::Log => written(&std::mem::take(&mut log)),
                            _ => Vec::new(),
                        };
                        writer.result(Status::Ok, &answer).unwrap();
                    }
                    Said::Failed(status, words) => {
                        log.push((status, words));
                        writer.result(status, &[]).unwrap();
                        failed = true;
                    }
                    Said::Cut => return None,
                    Said::Silent => {
                        std::thread::sleep(SOON);
                        return None;
                    }
                }
            }
            let len = writer.finish();
            let header = FrameHeader { bytes: len as u32, room: 0, tag: header.tag };
            stream.write_all(&[&header.encode()[..], &reply[..len]].concat()).ok()?;
        }
    }
}

fn info() -> Vec<u8> {
    let info = Info {
        name: "a host's",
        target: "fake",
        memory_bytes: MEMORY,
        memory_free: MEMORY / 2,
        deadline_us: DEADLINE.as_micros() as u64,
        fuel: 9,
        units: 1,
        lanes: 32,
        block_threads: 1024,
        shared_bytes: 1 << 16,
        grid: [65_535; 3],
        modules: 4,
        buffers: 4,
    };
    let mut bytes = vec![0; Info::MAX_BYTES];
    let len = info.encode(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

fn written(log: &[(Status, &str)]) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut writer = LogWriter::new(&mut bytes);
    for (status, text) in log {
        writer.entry(&LogEntry { batch: 0, operation: 0, status: *status, text }).unwrap();
    }
    let len = writer.finish();
    bytes.truncate(len);
    bytes
}

fn options() -> QueueOptions {
    QueueOptions { timeout: SOON, ..QueueOptions::default() }
}

fn soon() -> Instant {
    Instant::now() + SOON
}

/// A kernel of a module with as many others, of so many operations each.
fn artifact(others: usize, operations: usize) -> Artifact {
    let more = "  store @x[%i], %a\n".repeat(operations);
    let others = (0..others).map(|number| {
        format!(
            "kernel @other{number}(@x: view<f32, [?], readwrite>) at 0x1 block(32) {{
               %i = global_id.x : i64
               %a = load @x[%i] : f32
               {more}}}
             "
        )
    });
    let others: String = others.collect();
    let text = format!("vir 1\n{others}kernel @k(@x: view<f32, [?], write>) at 0x2 block(32) {{}}");
    let code = encode(&vm_ir::text::parse(&text).unwrap(), Lines::Strip);
    let view = ParameterKind::View {
        extents: vec![vm_accel::Extent::Any],
        element: vm_accel::Element::F32,
        align: 4,
        writes: true,
    };
    let signature = Signature {
        entry: "k".into(),
        block: [32, 1, 1],
        cluster: 1,
        shared_bytes: 0,
        parameters: vec![Parameter { name: "x".into(), kind: view }],
        tiles: vec![],
        guarded: false,
        cost_bound: 1,
    };
    // SAFETY: no host here runs it.
    unsafe { Artifact::new(code, signature) }.unwrap()
}

fn finish(queue: &GuestQueue) -> Result<(), Error> {
    let event = queue.event(false)?;
    queue.record(&event)?;
    queue.wait(&event, soon())
}

fn device(queue: &GuestQueue) -> Memory {
    queue.allocate(MemoryKind::Device, 4096).unwrap()
}

/// What a program hears when the host says something else to the first operation of a kind.
#[test]
fn a_program_hears_of_it() {
    let check = |which: fn(&Operation<'_>) -> bool, said: Said, wanted: &str, goes_on: bool| {
        let first = Mutex::new(true);
        let host = Host::new(move |operation| match which(operation) {
            true if std::mem::take(&mut *first.lock().unwrap()) => said,
            _ => Said::Done,
        });
        let queue = host.queue();
        let run = || {
            let memory = queue.allocate(MemoryKind::Device, 4096)?;
            let pinned = queue.allocate(MemoryKind::Pinned, 4096)?;
            queue.fill(memory.region(), 1)?;
            queue.copy(pinned.region(), memory.region())?;
            queue.load(&artifact(1, 0))?;
            finish(&queue)
        };
        let shown = format!("{said:?}, {wanted}");
        let error = run().expect_err(&shown);
        assert!(error.to_string().contains(wanted), "{shown}: {error}");
        assert_eq!(run().is_ok(), goes_on, "{shown}");
        assert_eq!(error.is_lost(), !goes_on, "{shown}");
    };
    use Operation::{Copy, CreateBuffer, CreateModule, Fence, Fill, ImportBuffer};
    let full = Said::Failed(Status::OutOfMemory, "no room");
    check(|one| matches!(one, CreateBuffer { .. }), full, "out of device memory: 4096 bytes wanted", true);
    let quota = Said::Failed(Status::Quota, "a guest has at most 4096 buffers");
    check(|one| matches!(one, CreateBuffer { .. }), quota, "a guest has at most 4096 buffers", true);
    check(|one| matches!(one, ImportBuffer { .. }), quota, "a guest has at most 4096 buffers", true);
    let module = Said::Failed(Status::Module, "module 1: no such op");
    check(
        |one| matches!(one, CreateModule { .. }),
        module,
        "kernel k can't be loaded: module 1: no such op",
        true,
    );
    check(
        |one| matches!(one, Fill { .. }),
        Said::Failed(Status::Range, "4096 bytes do not lie"),
        "Range (8), 4096 bytes",
        true,
    );
    check(|one| matches!(one, Copy { .. }), Said::Failed(Status::NoSuch, ""), "NoSuch (7)", true);
    let late =
        Said::Failed(Status::Deadline, "kernel spin was stopped: it took longer than 2s; give it more");
    check(|one| matches!(one, Fence), late, "kernel spin was stopped: it took longer than 2s", true);
    let fuel = Said::Failed(Status::OutOfFuel, "kernel spin was stopped: a thread");
    check(
        |one| matches!(one, Fence),
        fuel,
        "kernel spin was stopped: a thread took more than 9 iterations",
        true,
    );
    for cut in [Said::Cut, Said::Failed(Status::Lost, "")] {
        check(|one| matches!(one, CreateBuffer { .. }), cut, "the device's context is lost", false);
        check(|one| matches!(one, CreateModule { .. }), cut, "the device's context is lost", false);
        check(|one| matches!(one, Copy { .. }), cut, "the device's context is lost", false);
        check(|one| matches!(one, Fence), cut, "the device's context is lost", false);
    }
}

#[test]
fn a_wait_for_a_host_that_says_nothing_has_an_end() {
    let host = Host::new(|operation| match operation {
        Operation::Fence => Said::Silent,
        _ => Said::Done,
    });
    let queue = host.queue();
    let memory = device(&queue);
    queue.fill(memory.region(), 1).unwrap();
    let event = queue.event(false).unwrap();
    queue.record(&event).unwrap();
    assert!(!queue.done(&event).unwrap());
    let waited = queue.wait(&event, Instant::now() + Duration::from_millis(50));
    assert!(matches!(waited, Err(Error::Deadline { .. })), "{waited:?}");
    queue.free(memory).unwrap();
}

/// After the end of a stream, the next context has another.
#[test]
fn who_opens_again_goes_on() {
    let first = Mutex::new(true);
    let host = Host::new(move |operation| match operation {
        Operation::CreateBuffer { .. } if std::mem::take(&mut *first.lock().unwrap()) => Said::Cut,
        _ => Said::Done,
    });
    let accelerator = host.accelerator();
    let queue = accelerator.open(&options()).unwrap();
    assert!(queue.allocate(MemoryKind::Device, 1).is_err_and(|error| error.is_lost()));
    assert!(queue.memory().is_err_and(|error| error.is_lost()));
    let other = accelerator.open(&options()).unwrap();
    let _ = device(&other);
    finish(&other).unwrap();
}

/// Whose launch it was is not known: each context that gave something is told once, and who gave nothing is not.
#[test]
fn a_failure_is_told_once_to_each_whose_it_may_be() {
    let first = Mutex::new(true);
    let host = Host::new(move |operation| match operation {
        Operation::Fence if std::mem::take(&mut *first.lock().unwrap()) => {
            Said::Failed(Status::Deadline, "kernel k was stopped: it took longer")
        }
        _ => Said::Done,
    });
    let accelerator = host.accelerator();
    let [one, two, idle] = [(); 3].map(|()| accelerator.open(&options()).unwrap());
    let memories = [&one, &two].map(device);
    for (queue, memory) in [&one, &two].into_iter().zip(&memories) {
        queue.fill(memory.region(), 0).unwrap();
    }
    let late = Err(Error::DeadlineExceeded { kernel: "k".into(), limit: DEADLINE });
    assert_eq!(finish(&one), late);
    assert_eq!([finish(&one), finish(&idle), finish(&two), finish(&two)], [Ok(()), Ok(()), late, Ok(())]);
}

/// A session says it where it is next asked, also when what waited was no more than memory to be freed.
#[test]
fn a_session_reports_it_with_the_next_wait() {
    let first = Mutex::new(true);
    let host = Host::new(move |operation| match operation {
        Operation::Fence if std::mem::take(&mut *first.lock().unwrap()) => {
            Said::Failed(Status::Deadline, "kernel k was stopped: it took longer")
        }
        _ => Said::Done,
    });
    let session = Session::open(Arc::new(host.accelerator()), WorkerOptions::default()).unwrap();
    let kernel = session.load(&artifact(1, 0)).unwrap();
    let x = session.allocate(4096).unwrap();
    session.launch(&kernel, 1, &arguments![&x]).unwrap();
    drop(kernel);
    let until = soon();
    while !host.taken().contains(&"DestroyModule".to_owned()) {
        assert!(Instant::now() < until, "the kernel is not unloaded");
        session.poll();
    }
    assert_eq!(
        session.synchronize(soon()),
        Err(Error::DeadlineExceeded { kernel: "k".into(), limit: DEADLINE })
    );
    assert_eq!(session.synchronize(soon()), Ok(()));
}

/// Operations are sent in the order in which they were given, one by one or gathered, and each once.
#[test]
fn what_is_gathered_is_sent_by_itself() {
    let host = Host::new(|_| Said::Done);
    let queue = host.queue();
    let memory = device(&queue);
    finish(&queue).unwrap();
    host.taken();
    for value in 0..5000u32 {
        queue.fill(memory.region(), value as u8).unwrap();
    }
    // Nobody waits for them.
    let until = soon();
    let mut fills = 0;
    while fills < 5000 && Instant::now() < until {
        fills += host.taken().iter().filter(|word| *word == "Fill").count();
        std::thread::yield_now();
    }
    assert_eq!(fills, 5000);
    queue.free(memory).unwrap();
    finish(&queue).unwrap();
    assert_eq!(host.taken(), ["DestroyBuffer", "Fence"]);
}

/// What a batch has no room for goes by way of the window.
#[test]
fn a_module_of_any_size_is_sent() {
    let code: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let window: Arc<Mutex<Option<Arc<File>>>> = Arc::default();
    let (seen, file, range) = (code.clone(), window.clone(), Mutex::new(Range { address: 0, bytes: 0 }));
    let host = Host::new(move |operation| {
        match operation {
            Operation::CreateModule { code, .. } => seen.lock().unwrap().push(code.to_vec()),
            Operation::ImportBuffer { ranges, .. } => *range.lock().unwrap() = ranges.iter().next().unwrap(),
            Operation::CreateModuleFrom { source, .. } => {
                let mut bytes = vec![0; source.bytes as usize];
                let file = file.lock().unwrap().clone().unwrap();
                file.read_exact_at(&mut bytes, range.lock().unwrap().address + source.offset).unwrap();
                seen.lock().unwrap().push(bytes);
            }
            _ => {}
        }
        Said::Done
    });
    *window.lock().unwrap() = Some(host.window.clone());
    let queue = host.queue();
    let mut way = Vec::new();
    for others in [0, 1, 2] {
        let artifact = artifact(others, 60_000);
        host.taken();
        let kernel = queue.load(&artifact).unwrap();
        way.push((artifact.image().len(), host.taken()));
        assert_eq!(code.lock().unwrap().pop().as_deref(), Some(artifact.image()), "{others}");
        queue.unload(kernel).unwrap();
    }
    finish(&queue).unwrap();
    let [small, large, huge] = &way[..] else { panic!("{way:?}") };
    assert!(small.0 < 64 << 10 && small.1 == ["CreateModule"], "{small:?}");
    assert!(large.0 > 64 << 10 && large.1 == ["CreateModule"], "{large:?}");
    let by_window = ["Fence", "ImportBuffer", "CreateModuleFrom", "DestroyBuffer"];
    assert!(huge.0 > 1 << 20 && huge.1 == by_window, "{huge:?}");
}

#[test]
fn the_window_is_shared_out_again_when_nothing_uses_it() {
    let host = Host::new(|_| Said::Done);
    let queue = host.queue();
    for _ in 0..5 {
        let half = [(); 2].map(|()| queue.allocate(MemoryKind::Pinned, WINDOW / 2).unwrap());
        let full = queue.allocate(MemoryKind::Pinned, 1);
        assert!(matches!(full, Err(Error::OutOfMemory { kind: "pinned", .. })), "{full:?}");
        half.into_iter().for_each(|memory| queue.free(memory).unwrap());
    }
    let all = queue.allocate(MemoryKind::Pinned, WINDOW).unwrap();
    // Its end releases what was not freed.
    drop((all, queue));
    let queue = host.queue();
    queue.allocate(MemoryKind::Pinned, WINDOW).map(drop).unwrap();
}
