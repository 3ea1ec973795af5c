//! An ordinary Linux guest, with no driver of ours, shares the host's CPU as an accelerator: its programs send kernels over
//! vsock, and their data lies in a window of memory. Bad ones harm none but themselves.

use std::fs;
use std::io::{Read as _, Write as _};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vm_paravirt_guest::Error;
use vm_paravirt_guest::linux::Device;
use vm_paravirt_guest::protocol::{
    BatchWriter, CONFIG_BYTES, FRAME_BYTES, FrameHeader, NoRoom, Reply, Status,
};
use vsock::{VMADDR_CID_HOST, VsockStream};

use crate::agent::{
    AcceleratorProgram, GreedyProgram, Guest, GuestPlan, L1, L2, Program, grab_context_id, processes,
    wait_until,
};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-accel",
    about: "programs of a stock Linux guest launch kernels over vsock on a shared accelerator, well and badly",
    // The self-built Linux kernel has no vsock, and no device is passed.
    variants: Variants::Only(Variant::Group),
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 1024,
    deadline: Duration::from_secs(1800),
    contents: Contents { accelerators: true, linux_guest: true, examples: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const SHARED: &str = "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"32M\"\ndeadline = \"1s\"\nwindow = \"16M\"\n\n\
                      [vsock]\ncid = 42\n";
const WINDOW: u64 = 16 << 20;
const TIMEOUT: Duration = Duration::from_secs(600);
/// What the guest says when its worker may be killed, and when its vsock device was reset.
const KILL: &str = "kill-the-worker";
const RESET: &str = "vsock-was-reset";
/// The guest's context id.
const CID: u64 = 42;

fn l1(l1: &mut L1) -> Result<()> {
    let plan =
        |name| GuestPlan { program: Program::Linux, memory_mib: 192, ..GuestPlan::sharing(name, "", SHARED) };
    let mut guest = Guest::start(l1, &plan("programs"))?;
    let worker = wait_until("the worker", TIMEOUT, || guest.workers().pop())?;

    // Nobody gets the context id of another.
    let second = Guest::start(l1, &plan("second"))?.end(TIMEOUT)?;
    let expect = "another guest of this host has the context id 42";
    l1.prove(
        second.process.code != Some(0) && second.process.stderr.contains(expect),
        format!("a second guest can't start: {}", second.process.stderr.trim()),
    )?;

    let word = |word: &'static str| {
        move |report: &Report| matches!(report, Report::Value { name, .. } if name == word).then_some(())
    };
    guest.wait_for("the word to kill the worker", TIMEOUT, word(KILL))?;
    l1.prove(
        guest.workers() == [worker],
        "whatever the guest sent, it has the worker that it had at its start".to_owned(),
    )?;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(worker.cast_signed()).context("a process id")?,
        rustix::process::Signal::KILL,
    )?;
    // Whoever had the guest's context id while its device is reset could reach its window.
    let over = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        let grabbing = scope.spawn(|| grab_context_id(CID, &over));
        let reset = guest.wait_for("the reset of its vsock device", TIMEOUT, word(RESET));
        over.store(true, Ordering::Release);
        let grabbed = grabbing.join().unwrap_or_else(|_| bail!("the thread panicked"));
        reset.and(grabbed)
    })?;
    l1.prove(
        refused > 0,
        format!("the guest keeps its context id through a reset: {refused} tries were refused"),
    )?;
    let ended = guest.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(
        ended.process.stderr.matches("the worker was ended").count() == 1,
        "the log names the worker that was killed, and of no other".to_owned(),
    )?;
    l1.figure("run of the guest, from start to its end", ended.process.took.as_secs_f64(), "s");
    let gone = wait_until("the end of the workers", Duration::from_secs(60), || {
        processes("accelerator-worker").is_empty().then_some(())
    });
    l1.prove(gone.is_ok(), "no worker outlives its guest".to_owned())
}

fn l2(l2: &mut L2) -> Result<()> {
    // By the protocol's client, and as a worker of the guest's own.
    for program in ["/bin/softmax", "/bin/worker"] {
        let output = Command::new(program).output().with_context(|| format!("can't run {program}"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let wrong = String::from_utf8_lossy(&output.stderr);
        l2.prove(
            output.status.success(),
            format!("{program} computes what is right: {}{}", said.trim().replace('\n', ", "), wrong.trim()),
        )?;
    }

    // It stops within a frame, and has its end long after the others.
    let slow = Raw::open()?;
    slow.send(&FrameHeader { bytes: 64, room: 4096, tag: 1 }.encode()[..9])?;
    let slow_since = Instant::now();

    let mut program = AcceleratorProgram::start()?;
    program.add(7)?;
    l2.prove(program.window_bytes() == WINDOW, "sums of numbers in the window are right")?;
    program.stray()?;
    l2.prove(true, "a kernel that strays beyond its buffer changes nothing else of the window")?;
    ranges(l2, &mut program)?;
    endless(l2, &mut program)?;
    hostile(l2, &mut program)?;
    dies(l2, &mut program)?;

    let (replies, end) = slow.replies(Duration::from_secs(120))?;
    l2.prove(
        end && replies.is_empty(),
        format!("a program that stops within a frame has its end after {} s", slow_since.elapsed().as_secs()),
    )?;
    drop(program);
    let program = worker_dies(l2)?;
    // Last, since it ends the worker too.
    resets(l2, program)
}

fn ranges(l2: &mut L2, program: &mut AcceleratorProgram) -> Result<()> {
    for (address, bytes, expect) in [
        (WINDOW - 4096, 4096, Ok(())),
        (WINDOW - 4096, 4097, Err((0, Status::Range))),
        (WINDOW, 1, Err((0, Status::Range))),
        (u64::MAX, 1, Err((0, Status::Range))),
        (u64::MAX - 4095, 4096, Err((0, Status::Range))),
        (0, 0, Err((0, Status::Range))),
        // The guest's RAM, had the worker any of it.
        (64 << 20, 4096, Err((0, Status::Range))),
        (0, WINDOW, Err((0, Status::Quota))),
    ] {
        let ended = program.import(address, bytes)?;
        ensure!(ended == expect, "{bytes:#x} bytes at {address:#x} ended with {ended:?}");
    }
    l2.prove(true, "buffers over anything but the window are refused")
}

fn endless(l2: &mut L2, program: &mut AcceleratorProgram) -> Result<()> {
    // What it has to say of earlier things is not looked at.
    program.log()?;
    let (ended, took) = program.spin()?;
    let log = program.log()?;
    l2.prove(
        ended == Err((1, Status::Deadline)) && took >= Duration::from_secs(1),
        format!("a kernel without an end is stopped after {:.2} s", took.as_secs_f64()),
    )?;
    l2.prove(log.contains("took longer than 1s"), format!("the log says why: {log}"))?;
    program.add(-3)?;
    l2.prove(true, "the next results are right")
}

/// Bytes that no client sends, each on a connection of its own.
fn hostile(l2: &mut L2, program: &mut AcceleratorProgram) -> Result<()> {
    let query = batch(|batch| batch.query())?;
    let header = |bytes, room| FrameHeader { bytes, room, tag: 7 }.encode().to_vec();
    let frame = |batch: &[u8]| [header(batch.len() as u32, 4096), batch.to_vec()].concat();
    let mut version = query.clone();
    version[4] = 9;
    let mut count = query.clone();
    count[12] = 200;
    let mut length = query.clone();
    length[8] = 0xf8;
    // What is sent, what is answered, and whether the stream then has its end.
    let cases: [(&str, Vec<u8>, &[Status], bool); 9] = [
        ("no length", header(0, 64), &[Status::Malformed], true),
        ("a length beyond all", header(u32::MAX - 7, 64), &[Status::Malformed], true),
        ("no room for an answer", header(64, 0), &[Status::Malformed], true),
        ("ones", vec![0xff; 8192], &[Status::Malformed], true),
        ("no batch", frame(&[0; 64]), &[Status::Malformed], false),
        ("another version", frame(&version), &[Status::Version], false),
        ("more operations than there are", frame(&count), &[Status::Malformed], false),
        ("another length within", frame(&length), &[Status::Malformed], false),
        (
            "a bad one, then a good one",
            [frame(&length), frame(&query)].concat(),
            &[Status::Malformed, Status::Ok],
            false,
        ),
    ];
    for (name, bytes, expect, ends) in cases {
        let raw = Raw::open()?;
        raw.send(&bytes)?;
        let (replies, ended) = raw.replies(if ends { TIMEOUT } else { Duration::from_millis(300) })?;
        ensure!(replies == expect && ended == ends, "{name}: answered with {replies:?}, ended: {ended}");
        program.add(11).with_context(|| format!("beside {name}"))?;
    }
    l2.prove(
        true,
        "frames that are none end their stream at most, and a program beside them has right results",
    )?;

    let mut held = Vec::new();
    let refused = loop {
        ensure!(held.len() < 64, "the host serves any number of programs");
        let raw = Raw::open()?;
        let (replies, ended) = raw.replies(Duration::from_millis(200))?;
        if ended {
            break replies;
        }
        held.push(raw);
    };
    program.add(12)?;
    // With `program`; the one that stopped within a frame may have had its end by now.
    let served = held.len() + 1;
    l2.prove(
        refused == [Status::Quota] && served <= 16,
        format!("the host serves {served} programs at least, and refuses the next for its quota"),
    )
}

/// A program is killed in the middle of a kernel, and what it held is there for the others.
fn dies(l2: &mut L2, program: &mut AcceleratorProgram) -> Result<()> {
    let greedy =
        wait_until("room for one more program", Duration::from_secs(20), || GreedyProgram::start().ok())?;
    let (all, free) = program.memory()?;
    let ended = program.run(|batch| batch.create_buffer(5, 4096))?;
    ensure!(free == 0 && ended == Err((0, Status::Quota)), "it holds not all: {free} are free, {ended:?}");
    greedy.kill()?;
    let begin = Instant::now();
    wait_until("the memory of the program that was killed", Duration::from_secs(20), || {
        program.memory().is_ok_and(|(_, free)| free == all).then_some(())
    })?;
    let took = begin.elapsed().as_secs_f64();
    program.add(13)?;
    l2.prove(
        true,
        format!("what a program held that was killed within a kernel is free again after {took:.2} s"),
    )
}

/// The guest's vsock driver resets its device while a program is connected.
fn resets(l2: &mut L2, mut program: AcceleratorProgram) -> Result<()> {
    const DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";
    let (all, _) = program.memory()?;
    let ended = program.run(|batch| batch.create_buffer(6, 1 << 20))?;
    ensure!(ended.is_ok() && program.memory()?.1 < all, "a buffer was not made: {ended:?}");
    let devices = fs::read_dir(DRIVER).with_context(|| format!("can't read {DRIVER}"))?;
    let name = devices.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("virtio")?.parse::<u32>().is_ok().then_some(name)
    });
    let name = name.context("the driver has no device")?;
    fs::write(format!("{DRIVER}/unbind"), &name)?;
    let error = program.until_gone(Duration::from_secs(20))?;
    drop(program);
    fs::write(format!("{DRIVER}/bind"), &name)?;
    l2.report(&Report::Value { name: RESET.into(), value: String::new() });
    let mut program = wait_until("a connection after the reset", Duration::from_secs(20), || {
        AcceleratorProgram::start().ok()
    })?;
    wait_until("the memory of the connection that was reset", Duration::from_secs(20), || {
        program.memory().is_ok_and(|(_, free)| free == all).then_some(())
    })?;
    program.add(15)?;
    l2.prove(
        error == Error::NeedsReset,
        format!("a reset of the vsock device ends its connections and what they held: {error}"),
    )
}

/// The host's worker is killed: programs get an error, and the next connection has a new one.
fn worker_dies(l2: &mut L2) -> Result<AcceleratorProgram> {
    let mut program = AcceleratorProgram::start()?;
    program.add(16)?;
    l2.report(&Report::Value { name: KILL.into(), value: String::new() });
    let error = program.until_gone(Duration::from_secs(240))?;
    l2.prove(
        error == Error::NeedsReset,
        format!("a program whose worker was killed gets an error: {error}"),
    )?;
    drop(program);
    let mut program = AcceleratorProgram::start()?;
    program.add(17)?;
    l2.prove(true, "after that it connects again, and its results are right")?;
    Ok(program)
}

fn batch(fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; 256];
    let mut batch = BatchWriter::new(&mut bytes)?;
    fill(&mut batch)?;
    let len = batch.finish();
    bytes.truncate(len);
    Ok(bytes)
}

/// A connection without the client.
struct Raw(VsockStream);

impl Raw {
    fn open() -> Result<Self> {
        let port = Device::find()?.config().port;
        let mut stream = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, port)?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.read_exact(&mut [0; CONFIG_BYTES]).context("the greeting")?;
        Ok(Self(stream))
    }

    fn send(&self, bytes: &[u8]) -> Result<()> {
        Ok((&self.0).write_all(bytes)?)
    }

    /// What is answered until the stream's end, or for so long; and whether it ended.
    fn replies(&self, timeout: Duration) -> Result<(Vec<Status>, bool)> {
        self.0.set_read_timeout(Some(timeout))?;
        let (mut said, mut part) = (Vec::new(), [0; 4096]);
        let ended = loop {
            match (&self.0).read(&mut part) {
                Ok(0) => break true,
                Ok(count) => said.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break false,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break true,
                Err(error) => return Err(error.into()),
            }
        };
        let (mut rest, mut replies) = (&said[..], Vec::new());
        while let Some((header, after)) = rest.split_first_chunk::<FRAME_BYTES>() {
            let header = FrameHeader::decode_reply(header)?;
            let reply = after.get(..header.bytes as usize).context("a reply is cut off")?;
            let reply = Reply::decode(reply)?;
            replies.push(reply.check().map_or_else(|(_, status)| status, |()| Status::Ok));
            rest = &after[header.bytes as usize..];
        }
        if !rest.is_empty() {
            bail!("a reply is cut off");
        }
        Ok((replies, ended))
    }
}
