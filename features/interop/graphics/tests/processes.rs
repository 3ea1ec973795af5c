//! Another process renders, and this one's worker computes on its image in place: also when that process is killed.
//!
//! Where timelines have descriptors, both processes wait for each other on the device; else they say it over the socket.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::{Outcome, SIZE, TIMEOUT, after, check, options, pixels, spec};
use vm_accel::{Link, Mapped, Pixels, Registered, Timeline as _, arguments};
use vm_graphics::{Foreign, Format, Gpu, Timeline};
use vm_runtime::AnyAccelerator;

/// Where the child finds its parent.
const SOCKET: &str = "VM_GRAPHICS_SOCKET";

// What the parent asks the child for; each is followed by the frame's number, and answered by a byte.
const RENDER: u8 = 1;
const COMPARE: u8 = 2;

fn ask(mut socket: &UnixStream, what: u8, number: u8) -> Outcome<u8> {
    socket.write_all(&[what, number])?;
    let mut answer = [0];
    socket.read_exact(&mut answer)?;
    Ok(answer[0])
}

/// The process that renders.
#[test]
fn child() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    let serve = || -> Outcome<()> {
        let mut socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let accelerator = AnyAccelerator::open(&spec())?;
        let gpu = Gpu::beside(&accelerator, options())?;
        let (graphics, computed) = (gpu.timeline()?, gpu.timeline()?);
        let pattern = gpu.pattern(Format::Rgba8Unorm)?;
        let image = gpu.image("theirs", Format::Rgba8Unorm, SIZE)?;
        image.send(&socket)?;
        let shares = graphics.export()?.fd.is_some();
        socket.write_all(&[u8::from(shares)])?;
        if shares {
            graphics.send(&socket)?;
            computed.send(&socket)?;
        }
        let mut order = [0; 2];
        while socket.read_exact(&mut order).is_ok() {
            let number = u64::from(order[1]);
            let before = (&computed, if shares { number - u64::from(order[0] == RENDER) } else { 0 });
            let mut frame = gpu.frame()?;
            if order[0] == RENDER {
                frame.draw(&pattern, &image, number as u32)?;
                frame.submit_between(&[before], &[(&graphics, number)])?;
                if !shares {
                    gpu.finish()?;
                }
                socket.write_all(&[1])?;
                continue;
            }
            let found = frame.read_image(&image)?;
            frame.submit_between(&[before], &[])?;
            gpu.finish()?;
            let right = found.bytes()? == pixels(SIZE, |x, y| after(x, y, number as u32));
            socket.write_all(&[u8::from(right)])?;
        }
        Ok(())
    };
    serve().unwrap_or_else(|error| panic!("{error}"));
}

struct Peer {
    child: Child,
    socket: UnixStream,
    link: Link<AnyAccelerator>,
    /// What the child signals, or this process for it; and what the worker signals.
    graphics: Timeline,
    computed: Timeline,
    shares: bool,
    image: Option<Registered<AnyAccelerator, Foreign<Pixels>>>,
}

impl Peer {
    fn start(rig: &common::Rig) -> Outcome<Self> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", "child", "--nocapture"])
            .env(SOCKET, &path)
            .spawn()?;
        let end = Instant::now() + TIMEOUT;
        let socket = loop {
            match listener.accept() {
                Ok((socket, _)) => break socket,
                Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) if Instant::now() > end || child.try_wait()?.is_some() => {
                    child.kill()?;
                    child.wait()?;
                    return Err("the child does not come".into());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let image = Foreign::<Pixels>::receive(&socket)?.ok_or("the child has ended")?;
        image.check(&**rig.worker.accelerator())?;
        let mut shares = [0];
        (&socket).read_exact(&mut shares)?;
        let shares = shares == [1];
        let timeline = || -> Outcome<Timeline> {
            match shares {
                true => Ok(rig.gpu().receive_timeline(&socket)?.ok_or("the child has ended")?),
                false => Ok(rig.gpu().timeline()?),
            }
        };
        let (graphics, computed) = (timeline()?, timeline()?);
        let link = rig.worker.link(graphics.export()?, computed.export()?)?;
        let image = Some(rig.worker.register_resource(image)?);
        Ok(Self { child, socket, link, graphics, computed, shares, image })
    }

    fn launch(&self, rig: &common::Rig, image: &Mapped<AnyAccelerator, Foreign<Pixels>>) -> Outcome<()> {
        let [width, height] = image.layout().size;
        let extents = [height, width].map(u64::from);
        let sums = rig.worker.allocate_zeroed(4 * extents[0] * extents[1])?;
        let given = arguments![image.surface(0)?, sums.shaped(&extents)?];
        Ok(rig.worker.launch(&rig.kernel, [width.div_ceil(64), height, 1], &given)?)
    }

    fn turn(&mut self, rig: &common::Rig, number: u8) -> Outcome<()> {
        assert_eq!(ask(&self.socket, RENDER, number)?, 1);
        if !self.shares {
            self.graphics.signal(number.into())?;
        }
        let image = self.image.take().ok_or("no image")?.map(&self.link, number.into())?;
        self.launch(rig, &image)?;
        let image = image.unmap()?;
        assert_eq!(image.ready(), u64::from(number));
        if !self.shares {
            assert!(self.computed.wait(image.ready(), Instant::now() + TIMEOUT)?);
        }
        self.image = Some(image);
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn another_process_renders() {
    check(|rig| {
        for killed in [false, true, false] {
            let mut peer = Peer::start(&rig)?;
            for number in 1..=5 {
                peer.turn(&rig, number)?;
                assert_eq!(ask(&peer.socket, COMPARE, number)?, 1, "the child sees what the kernel wrote");
            }
            let image = peer.image.take().ok_or("no image")?;
            if killed {
                // The worker waits for a frame that never comes.
                let mapped = image.map(&peer.link, 6)?;
                peer.launch(&rig, &mapped)?;
                let image = mapped.unmap()?;
                peer.child.kill()?;
                peer.child.wait()?;
                assert!(ask(&peer.socket, COMPARE, 5).is_err(), "its end shows");
                peer.graphics.signal(6)?;
                assert!(peer.computed.wait(image.ready(), Instant::now() + TIMEOUT)?);
                drop(image.unregister()?);
            } else {
                drop(image.unregister()?);
                peer.socket.shutdown(std::net::Shutdown::Both)?;
                assert!(peer.child.wait()?.success());
            }
        }
        Ok(rig)
    });
}
