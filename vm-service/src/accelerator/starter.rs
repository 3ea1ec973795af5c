//! Starts workers' processes, from a thread that stays.
//!
//! A worker ends with the thread that started it, by its own wish (`PR_SET_PDEATHSIG`), so that one that was taken over
//! does not outlive its VMM. That thread must not end before the process does.

use std::io;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};

type Order = (Command, SyncSender<io::Result<Child>>);

/// Starts a process.
///
/// # Errors
/// The Linux kernel's, and when there is no thread for it.
pub(super) fn start(command: Command) -> io::Result<Child> {
    static STARTER: OnceLock<Option<Sender<Order>>> = OnceLock::new();
    let none = || io::Error::other("the thread that starts workers can't be had");
    let starter = STARTER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        let serve = move || {
            for (mut command, answer) in orders {
                // Whoever asked waits for it.
                let _ = answer.send(command.spawn());
            }
        };
        std::thread::Builder::new().name("starter".into()).spawn(serve).ok().map(|_| sender)
    });
    let (answer, answered) = sync_channel(1);
    starter.as_ref().and_then(|starter| starter.send((command, answer)).ok()).ok_or_else(none)?;
    answered.recv().map_err(|_| none())?
}
