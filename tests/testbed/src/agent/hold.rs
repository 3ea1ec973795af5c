//! A process that holds a VFIO device open, and so keeps it from being unbound.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Function, sys};
use crate::scenario::Variant;

const HOLD: &str = "hold-vfio-device";
const READY: &str = "held";
/// It ends by itself after this, should nobody end it.
const LIFE: Duration = Duration::from_secs(600);

/// The process.
#[derive(Debug)]
pub struct Holder {
    process: Child,
    /// The device node that it holds.
    pub node: String,
}

impl Holder {
    /// Starts a process that opens the function, which vfio-pci must have.
    ///
    /// # Errors
    /// When it can't open it.
    pub fn start(function: &Function, variant: Variant) -> Result<Self> {
        Self::open(&function.vfio_node(variant)?, &function.address)
    }

    /// Starts a process that opens a physical function through its group, and sets the token that its virtual functions are
    /// opened with.
    ///
    /// # Errors
    /// When it can't open it.
    pub fn with_token(function: &Function, token: &str) -> Result<Self> {
        Self::open(&function.vfio_node(Variant::Group)?, &format!("{} vf_token={token}", function.address))
    }

    fn open(node: &str, name: &str) -> Result<Self> {
        let node = node.to_owned();
        let mut process = Command::new("/init")
            .args([HOLD, &node, name])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("can't start the holder")?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().context("the holder has no output")?).read_line(&mut line)?;
        ensure!(line.trim() == READY, "the holder did not open {node}");
        Ok(Self { process, node })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Node and address, if these are the arguments of a holder.
pub(super) fn parse(mut arguments: impl Iterator<Item = String>) -> Option<(String, String)> {
    arguments.next()?;
    (arguments.next()? == HOLD).then_some(())?;
    Some((arguments.next()?, arguments.next()?))
}

/// Opens the device and keeps it open.
pub(super) fn hold((node, address): &(String, String)) -> ! {
    let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
    let held = || -> Result<(File, Option<(File, std::os::fd::OwnedFd)>)> {
        let file = open(Path::new(node))?;
        if node.starts_with("/dev/vfio/devices/") {
            return Ok((file, None));
        }
        let container = open(Path::new("/dev/vfio/vfio"))?;
        let device = sys::open_group_device(&container, &file, address)?;
        Ok((file, Some((container, device))))
    };
    match held() {
        Ok(files) => {
            println!("{READY}");
            // The reader waits for this line only.
            let _ = std::io::stdout().flush();
            std::thread::sleep(LIFE);
            drop(files);
            std::process::exit(0);
        }
        Err(error) => {
            eprintln!("testbed-agent: can't hold {node}: {error:#}");
            std::process::exit(1);
        }
    }
}
