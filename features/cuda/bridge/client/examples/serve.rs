//! A server for tests and benchmarks: `serve SOCKET DRIVER` serves each program that connects by a process of its own, unconfined, and records it
//! into the folder that `VM_BRIDGE_RECORD` names. Use `vm-service bridge serve` for all else.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use vm_bridge::recording::Recorder;
use vm_bridge::server::{Driver, Exports, HostMemory, Prints, Session, serve};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [driver] => {
            let connection = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
            let server = UnixStream::from(std::io::stdout().as_fd().try_clone_to_owned()?);
            let recorder = std::env::var_os("VM_BRIDGE_RECORD").map(|folder| {
                Recorder::new(
                    File::create_new(Path::new(&folder).join(std::process::id().to_string()))?,
                    1 << 30,
                )
            });
            let session = Session::new(Arc::new(Driver::open(Path::new(driver))?));
            let mut log = File::from(std::io::stderr().as_fd().try_clone_to_owned()?);
            let session = session
                .share_by(server)
                .recorded_by(recorder.transpose()?)
                .printing(Prints::begin(&HostMemory::new(u64::MAX))?);
            let session = Arc::new(session);
            let result = serve(&connection, &session);
            if let Err(error) = &result {
                writeln!(log, "{error}")?;
            }
            // Lanes may be in calls that never end.
            std::process::exit(i32::from(result.is_err()));
        }
        [socket, driver] => {
            let listener = UnixListener::bind(socket)?;
            println!("ready");
            let exports = Exports::default();
            for connection in listener.incoming() {
                let (ours, theirs) = UnixStream::pair()?;
                let mut command = Command::new(std::env::current_exe()?);
                let (input, output) = [OwnedFd::from(connection?), theirs.into()].map(Stdio::from).into();
                let mut child = command.arg(driver).stdin(input).stdout(output).spawn()?;
                // It would not be closed with the child.
                drop(command);
                let exports = exports.clone();
                std::thread::spawn(move || {
                    if let Err(error) = exports.serve(&ours) {
                        eprintln!("{error}");
                    }
                    child.wait()
                });
            }
            Ok(())
        }
        _ => Err("serve SOCKET DRIVER".into()),
    }
}
