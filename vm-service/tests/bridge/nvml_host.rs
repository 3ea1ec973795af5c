//! What the server's own NVML tells reaches programs, and nothing else of it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use vm_bridge::orders;
use vm_bridge::wire::nvml::{FUNCTIONS, MOST, Parameter, Question, Value, number};
use vm_bridge::wire::{VERSION, control};

use crate::nvml::{Place, gcc, says, source, theirs};
use crate::process::until;

/// A server of two devices with the NVML of `host.c`.
fn place() -> Place {
    Place::with(|folder, server| {
        server.arg("--stream").arg(folder.join("stream"));
        theirs(folder, server, "host.c")
    })
}

/// Kinds of transport with their sockets' names.
const WAYS: [[&str; 2]; 2] = [["unix", "socket"], ["stream", "stream"]];

fn by(place: &Place, [kind, name]: [&str; 2]) -> String {
    format!("{kind}:{}", place.folder.path().join(name).display())
}

#[test]
fn a_program_is_told_what_the_servers_nvml_tells() {
    let place = place();
    let program = place.folder.path().join("tells");
    gcc(&program, &source("tests/tells.c"), &[]);
    let natively = says(Command::new(&program).env("LD_LIBRARY_PATH", place.folder.path().join("theirs")));
    // What it is about: that there are links, and where they go.
    for line in [
        "nvmlDeviceGetNvLinkState 3: 0 1\n",
        "nvmlDeviceGetNvLinkCapability 3 0: 0 1\n",
        "nvmlDeviceGetP2PStatus 1 2: 0 0\n",
        "nvmlDeviceGetTemperature: 0 in its range\n",
        "nvmlDeviceGetGpuFabricInfoV: 0 ",
    ] {
        assert!(natively.contains(line), "{line}: {natively}");
    }
    for (link, bus) in [(3, "00000000:02:00.0"), (4, "00000000:0A:00.0")] {
        let line = format!("nvmlDeviceGetNvLinkRemotePciInfo {link}: 0 ");
        let line = natively.lines().find(|told| told.starts_with(&line)).expect("a link");
        assert!(line.contains(bus), "{line}");
    }
    for way in WAYS {
        let mut command = place.command(&program);
        command.env("VM_BRIDGE", by(&place, way));
        // The fake driver's name depends on whether it is built with what runs kernels.
        let bridged = says(&mut command);
        let differ = natively.lines().zip(bridged.lines()).find(|(first, second)| first != second);
        assert_eq!((differ, bridged.lines().count()), (None, natively.lines().count()), "{way:?}");
    }
    // Each function that is asked for is compared there, but one which host.c does not answer.
    let text = std::fs::read_to_string(source("tests/tells.c")).expect("the program");
    for name in FUNCTIONS.iter().map(|function| function.name) {
        let is_there = text.contains(&format!("\"{name}\""));
        assert!(is_there != (name == "nvmlDeviceGetNvLinkUtilizationControl"), "{name}");
    }
}

#[test]
fn threads_children_and_devices_that_hang_are_answered() {
    let place = place();
    for way in ["telemetry", "hangs"] {
        assert_eq!(says(place.program().arg(way)), "right\n", "{way}");
    }
}

#[test]
fn a_session_of_questions_ends_and_begins_anew() {
    let place = place();
    let programs = WAYS.map(|way| {
        let mut program = place.program();
        program.arg("quiet").env("VM_BRIDGE", by(&place, way)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = program.spawn().expect("the program");
        let mut output = BufReader::new(program.stdout.take().expect("its output")).lines();
        assert_eq!(output.next().expect("a line").expect("a line"), "ready");
        (program, output)
    });
    until("the workers end", || place.server.workers().is_empty());
    for (mut program, output) in programs {
        program.stdin.take().expect("its input").write_all(b"\n").expect("a line");
        let rest: Vec<_> = output.map(|line| line.expect("a line")).collect();
        assert_eq!(rest, ["right"]);
        assert!(program.wait().expect("ended").success());
    }
}

#[test]
fn a_server_without_nvml_says_so_once() {
    let check = |place: &Place, code: &str, line: &str| {
        assert_eq!(says(place.program().args(["without", code])), "right\n", "{code}");
        assert_eq!(place.log().matches(line).count(), usize::from(!line.is_empty()), "{}", place.log());
    };
    check(&Place::new(), "3", "the server has no NVML of NVIDIA's");
    check(&Place::with(|folder, server| theirs(folder, server, "none.c")), "3", "the server has no NVML");
}

/// A program's connection, which says what no program says.
struct Hostile(UnixStream);

impl Hostile {
    fn new(place: &Place) -> Self {
        let stream = UnixStream::connect(place.folder.path().join("socket")).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let hello = orders::give(&stream, [control::HELLO, VERSION.into(), 0, 0], &[], &[]);
        assert_eq!(hello.expect("an answer"), 0);
        Self(stream)
    }

    /// What is answered; none where the session ends.
    fn give(&mut self, len: u64, bytes: &[u8]) -> Option<(u64, Vec<u8>)> {
        let code = orders::give(&self.0, [control::NVML, len, 0, 0], bytes, &[]).ok()?;
        let mut answer = Vec::new();
        if code == 0 {
            let mut len = [0; 8];
            self.0.read_exact(&mut len).expect("a length");
            answer.resize(u64::from_ne_bytes(len) as usize, 0);
            assert!(answer.len() <= MOST);
            self.0.read_exact(&mut answer).expect("an answer");
        }
        Some((code, answer))
    }

    fn ask(&mut self, question: &mut Question) -> u32 {
        let bytes = question.to_bytes();
        let (code, answer) = self.give(bytes.len() as u64, &bytes).expect("an answer");
        assert_eq!(code, 0);
        question.take(&answer).expect("an answer")
    }
}

#[test]
fn what_no_program_asks_is_refused() {
    // The host's NVML has two devices, of which the driver, and so the program, has one.
    let place = Place::with(|folder, server| {
        server.env("VM_CUDA_FAKE_DEVICES", "1");
        theirs(folder, server, "host.c")
    });
    let device = |last: u8| {
        let mut uuid = *b"vm-cuda-fake\0\0\0\0";
        uuid[15] = last;
        Value::Device(uuid)
    };
    let memory = |len: usize| Value::Memory(vec![0; len]);
    let question = |name: &str, values: Vec<Value>| Question { function: number(name).expect(name), values };
    let mut hostile = Hostile::new(&place);
    let mut check = |name: &str, values: Vec<Value>, result: u32| {
        assert_eq!(hostile.ask(&mut question(name, values)), result, "{name}");
    };
    let temperature = |of: Value| vec![of, Value::Number(0), memory(4)];
    check("nvmlDeviceGetTemperature", temperature(device(0)), 0);
    check("nvmlDeviceGetTemperature", temperature(device(1)), 15);
    check("nvmlDeviceGetTemperature", temperature(Value::Device([0xff; 16])), 15);
    check("nvmlDeviceGetP2PStatus", vec![device(0), device(1), Value::Number(0), memory(4)], 15);
    check("nvmlDeviceGetNvLinkState", vec![device(0), Value::Number(63), memory(4)], 2);
    // What may be asked, with whatever is in it, is answered: the process lives.
    let mut seed = 1u64;
    for round in 0..20 {
        for (function, of) in FUNCTIONS.iter().enumerate() {
            if of.name == "nvmlDeviceGetNvLinkUtilizationControl" {
                continue;
            }
            let mut random = || {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                seed
            };
            let mut items = 0;
            let values = of.parameters.iter().map(|parameter| match *parameter {
                Parameter::Device => device(0),
                Parameter::Number(most) => {
                    items = (random() % most.min(1 << 40).saturating_add(1)) as usize;
                    Value::Number(items as u64)
                }
                Parameter::Bytes(len) => Value::Memory((0..len).map(|_| random() as u8).collect()),
                Parameter::Version(versions) => {
                    let version = versions[random() as usize % versions.len()];
                    let mut bytes = vec![round; (version & 0xff_ffff) as usize];
                    bytes[..4].copy_from_slice(&version.to_ne_bytes());
                    Value::Memory(bytes)
                }
                Parameter::Sized(most) => Value::Sized(vec![round; random() as usize % (most + 1)]),
                Parameter::Count(most) => {
                    items = random() as usize % (most as usize + 1);
                    Value::Memory((items as u32).to_ne_bytes().to_vec())
                }
                Parameter::List(_) if random() % 4 == 0 => Value::Nothing,
                Parameter::List(len) | Parameter::Array(len) => Value::Memory(vec![round; items * len]),
            });
            let mut question = Question { function, values: values.collect() };
            let result = hostile.ask(&mut question);
            assert!([0, 2, 3, 6, 7, 25].contains(&result), "{}: {result}", of.name);
        }
    }
    // What may not ends its session, and no other.
    let right = question("nvmlDeviceGetTemperature", temperature(device(0))).to_bytes();
    let mut beyond = right.clone();
    beyond[0] = FUNCTIONS.len() as u8;
    let longer = [&right[..], &[0; 8]].concat();
    let mut link =
        question("nvmlDeviceGetNvLinkState", vec![device(0), Value::Number(63), memory(4)]).to_bytes();
    link[24] = 64;
    for bytes in [&beyond, &longer, &link, &right[..right.len() - 8].to_vec(), &Vec::new()] {
        let mut other = Hostile::new(&place);
        assert_eq!(other.give(bytes.len() as u64, bytes), None, "{bytes:?}");
    }
    assert_eq!(Hostile::new(&place).give(MOST as u64 + 8, &vec![0; MOST + 8]), None);
    assert_eq!(Hostile::new(&place).give(u64::MAX, &[]), None);
    assert_eq!(hostile.ask(&mut question("nvmlDeviceGetTemperature", temperature(device(0)))), 0);
}
