//! An eGPU that comes and goes on a USB4 bus mocked by umockdev, whose uevents are heard. Its PCI functions are simulated.
#![cfg(feature = "sim")]

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Event, Guests, HostEnclosure, Limits, Manager, Policy, State};
use vm_passthrough::host::SysfsWriter;
use vm_passthrough::sim::{SimFunction, SimHost};
use vm_passthrough::usb4::HotplugEvents;
use vm_passthrough::{Host, PciAddress};

const ID: &str = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30";
const SOON: Duration = Duration::from_secs(20);

/// umockdev with its bus.
struct Mock {
    process: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
    root: PathBuf,
}

impl Mock {
    /// `None` where it is not installed.
    fn start() -> io::Result<Option<Self>> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/umockdev.py");
        let mut command = Command::new("umockdev-wrapper");
        command.arg("python3").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            process => process?,
        };
        let asks = process.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut answers = BufReader::new(process.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
        let mut root = String::new();
        answers.read_line(&mut root)?;
        Ok(Some(Self { process, asks, answers, root: root.trim().into() }))
    }

    fn does(&mut self, what: &str) {
        writeln!(self.asks, "{what}").expect("umockdev runs");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("umockdev answers");
        assert_eq!(answer, "done\n", "{what}");
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What the Linux kernel does about `authorized`: the functions behind the router come and go.
#[derive(Debug)]
struct Kernel {
    sim: SimHost,
}

fn address(text: &str) -> PciAddress {
    text.parse().expect("an address")
}

const PORT: &str = "0000:00:07.0";
const UPSTREAM: &str = "0000:30:00.0";
const DOWNSTREAM: &str = "0000:31:01.0";
const GPU: &str = "0000:32:00.0";

impl SysfsWriter for Kernel {
    fn write(&self, path: &Path, value: &str, _: Duration) -> io::Result<()> {
        if !path.ends_with("0-1/authorized") {
            return std::fs::write(path, value);
        }
        let [port, upstream, downstream, gpu] = [PORT, UPSTREAM, DOWNSTREAM, GPU].map(address);
        match value {
            "1" => {
                self.sim.add(&SimFunction::root_port(upstream).below(port).group(30))?;
                self.sim.add(&SimFunction::root_port(downstream).below(upstream).group(30))?;
                self.sim.add(&SimFunction::gpu(gpu).below(downstream).group(32))?;
                let mut functions = [upstream, downstream, gpu].into_iter();
                functions.try_for_each(|function| self.sim.set(function, "removable", "removable\n"))?;
            }
            _ => {
                [gpu, downstream, upstream].into_iter().try_for_each(|function| self.sim.remove(function))?
            }
        }
        std::fs::write(path, format!("{value}\n"))
    }
}

#[derive(Debug)]
struct NoGuests;

impl Guests for NoGuests {
    fn detach(&self, _: &[PciAddress], _: bool) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn an_egpu_that_comes_and_goes_is_heard_and_followed() {
    let Some(mut mock) = Mock::start().expect("umockdev") else {
        println!("skipped: umockdev is not installed");
        return;
    };
    let sim = SimHost::new().expect("a host");
    sim.add(&SimFunction::root_port(address(PORT)).group(7)).expect("a port");
    sim.set(address(PORT), "removable", "removable\n").expect("an attribute");
    sim.write("proc/sys/kernel/osrelease", "6.14.0\n").expect("a release");
    let mut host = Host::at(&sim.path(""), Arc::new(Kernel { sim: sim.clone() }));
    host.thunderbolt = mock.root.join("sys/bus/thunderbolt");
    // umockdev sends to all sockets of such a name.
    let socket = mock.root.join("event1");
    let events = HotplugEvents::at(&socket).expect("a socket");
    assert!(HotplugEvents::at(&socket).is_err(), "another has it");
    let hears = |expect: bool| {
        let timeout = if expect { SOON } else { Duration::from_millis(50) };
        assert_eq!(events.wait(timeout).expect("it is read"), expect);
        // Each comes twice, or with others.
        while events.wait(Duration::from_millis(50)).expect("it is read") {}
    };
    let id = ID.parse().expect("a UUID");
    let enclosure =
        HostEnclosure::new(&host, id, Policy::default(), None, Cancel::default(), Box::new(NoGuests));
    let mut manager = Manager::new(enclosure, Limits::default());
    let poll = |manager: &mut Manager<HostEnclosure>| {
        manager.poll(&mut |_| ()).expect("it can be looked at");
        manager.state()
    };
    hears(false);
    assert_eq!(poll(&mut manager), State::Absent);
    mock.does("add-block sda");
    hears(false);
    for _ in 0..3 {
        mock.does(&format!("add 0-1 {ID}"));
        hears(true);
        assert_eq!(poll(&mut manager), State::Disconnected);
        manager.take(Event::Connect, &mut |_| ());
        assert_eq!(manager.state(), State::Ready, "{:?}", manager.failure());
        mock.does("change 0-1");
        hears(true);
        assert_eq!(poll(&mut manager), State::Ready, "{:?}", manager.failure());
        // It is pulled: the functions go with the router.
        for function in [GPU, DOWNSTREAM, UPSTREAM] {
            sim.remove(address(function)).expect("removed");
        }
        mock.does("remove 0-1");
        hears(true);
        assert_eq!(poll(&mut manager), State::Absent);
        assert_eq!(manager.leftover(), None);
    }
    drop(events);
    assert!(!socket.exists());
}
