//! A device's keeper: the thread that does with it what takes a path or rights, which the VMM has not.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

use rustix::net::Shutdown;
use vm_passthrough::PciAddress;
use vm_passthrough::vfio::{DeviceFile, Keeper, Presence, ResetReport, Result, VfioDevice, VfioError};

use super::wire::{Call, Reply};
use crate::os::process::{packets, socketpair};

/// The calls for a device that are served, until this is dropped.
pub(super) struct Served(Arc<Line>);

struct Line {
    socket: OwnedFd,
    ended: AtomicBool,
}

impl Served {
    /// Serves no more: what is under way is the last, whatever waits.
    pub(super) fn end(&self) {
        self.0.ended.store(true, Ordering::SeqCst);
        // The VMM may keep its end. It fails when that is closed already.
        let _ = rustix::net::shutdown(&self.0.socket, Shutdown::Both);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.end();
    }
}

/// Serves a VMM's calls for a device, one after the other, and counts the resets that were proved: `proved` is locked during each,
/// which may outlast the VMM. With the VMM's end; `refuse` gets what it should not have done.
///
/// # Errors
/// When this process has no threads or descriptors left.
pub(super) fn serve(
    device: Arc<VfioDevice>,
    proved: Arc<Mutex<u32>>,
    refuse: impl FnOnce(String) + Send + 'static,
) -> io::Result<(Served, OwnedFd)> {
    let address = device.address();
    let act = move |call| match call {
        Call::Wake => DeviceFile::wake(&*device).map_or_else(Reply::from, |()| Reply::Done),
        Call::Reset => {
            let mut proved = proved.lock().unwrap_or_else(PoisonError::into_inner);
            DeviceFile::reset_and_prove(&*device).map_or_else(Reply::from, |report| {
                *proved += 1;
                Reply::Reset(report.into())
            })
        }
        Call::SetAtRest(at_rest) => {
            DeviceFile::set_at_rest(&*device, at_rest);
            Reply::Done
        }
        Call::Presence => device.presence().into(),
    };
    answer(address, act, refuse)
}

/// Has a thread answer calls for a device with what `act` does.
fn answer(
    address: PciAddress,
    act: impl Fn(Call) -> Reply + Send + 'static,
    refuse: impl FnOnce(String) + Send + 'static,
) -> io::Result<(Served, OwnedFd)> {
    let (socket, theirs) = socketpair()?;
    let line = Arc::new(Line { socket, ended: AtomicBool::new(false) });
    let served = Served(line.clone());
    let serve = move || {
        loop {
            let call = match packets::receive(&line.socket) {
                _ if line.ended.load(Ordering::SeqCst) => return,
                Ok(Some((call, _))) => call,
                Ok(None) => return,
                Err(error) => return refuse(format!("made an invalid call for {address} ({error})")),
            };
            // One that does not listen gets nothing.
            if packets::offer(&line.socket, &act(call), &[]).is_err() {
                return;
            }
        }
    };
    Builder::new().name("keeper".into()).spawn(serve)?;
    Ok((served, theirs))
}

/// The keeper of a device, as its VMM has it.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) address: PciAddress,
    pub(super) socket: Mutex<OwnedFd>,
}

impl Remote {
    fn call(&self, call: Call) -> Result<Reply> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = packets::send(&*socket, &call, &[]).and_then(|()| packets::receive(&*socket));
        let unavailable = |reason| VfioError::Unavailable { address: self.address, reason };
        match answered {
            Ok(Some((Reply::WantedBack, _))) => Err(VfioError::WantedBack { address: self.address }),
            Ok(Some((Reply::Failed(reason), _))) => Err(unavailable(reason)),
            Ok(Some((reply, _))) => Ok(reply),
            Ok(None) => Err(unavailable("its keeper has gone".into())),
            Err(error) => Err(unavailable(format!("its keeper can't be asked: {error}"))),
        }
    }
}

impl Keeper for Remote {
    fn wake(&self) -> Result<()> {
        self.call(Call::Wake).map(drop)
    }

    fn reset_and_prove(&self) -> Result<ResetReport> {
        match self.call(Call::Reset)? {
            Reply::Reset(reset) => Ok(reset.into()),
            _ => Err(VfioError::Unavailable {
                address: self.address,
                reason: "its keeper did not say how it was reset".into(),
            }),
        }
    }

    fn set_at_rest(&self, at_rest: bool) {
        // A device without its keeper is not reset, along with another or by itself.
        let _ = self.call(Call::SetAtRest(at_rest));
    }

    fn presence(&self) -> Presence {
        match self.call(Call::Presence) {
            Ok(Reply::Asleep) => Presence::Asleep,
            Ok(Reply::Gone(evidence)) => Presence::Gone(evidence),
            Ok(_) => Presence::Present,
            Err(error) => Presence::Gone(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_no_call_is_refused() {
        let (sender, refused) = channel();
        let address = "0000:01:00.0".parse().expect("an address");
        let refuse = move |fault| sender.send(fault).expect("somebody waits");
        let (_served, vmm) = answer(address, |_| Reply::Present, refuse).expect("a socket");
        packets::send(&vmm, &Call::Presence, &[]).expect("sent");
        assert!(matches!(packets::receive(&vmm), Ok(Some((Reply::Present, _)))));
        rustix::io::write(&vmm, b"\"Rest\"").expect("sent");
        let fault: String = refused.recv_timeout(Duration::from_secs(30)).expect("it is refused");
        assert!(fault.starts_with("made an invalid call for 0000:01:00.0 ("), "{fault}");
    }
}
