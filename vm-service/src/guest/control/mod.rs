//! The control socket of a guest: how other processes see a guest and ask something of it while it runs.
//!
//! ```text
//! STATE/guests/NAME/   lock      held (flock(2)) as long as the guest lives
//!                      control   the socket, a Unix stream; JSON lines
//! ```
//!
//! A client sends `{"id": 1, "request": {"type": "status"}}` and gets `{"id": 1, "answer": {"ok": …}}` or `{"id": 1, "answer":
//! {"error": {"code": …, "message": …}}}`; one that has subscribed also gets `{"event": …}`. Requests may be answered in any order.
//! Within one version fields and kinds of values are only added, and readers ignore what they do not know.
//!
//! Only root and the user that runs the guest are served. All that they may send is bounded: the length of a line, the number
//! of connections, the requests in flight, and the time that half a line or an answer that is not read may take. Who does not
//! read is dropped, and never waited for.

mod client;
mod home;
mod lines;
mod server;
mod wire;

use std::os::fd::AsFd;

pub(crate) use client::{CallError, Caller, Connection, reach};
pub(crate) use home::{GuestHome, HomeError, LOG, PREVIOUS_LOG, names};
pub(crate) use server::{Answer, Controlled, Outbox, Server};

/// Whether the other end of a socket is root or this process's user.
pub(crate) fn is_trusted(stream: impl AsFd) -> bool {
    let own = rustix::process::geteuid();
    match rustix::net::sockopt::socket_peercred(stream) {
        Ok(peer) if peer.uid.is_root() || peer.uid == own => true,
        Ok(peer) => {
            tracing::warn!(
                "a connection of user {} is refused; only root and user {} are served",
                peer.uid,
                own
            );
            false
        }
        Err(_) => false,
    }
}

/// Feeds arbitrary bytes to the reader of control sockets, for fuzzing: each line is a request or is refused in words, and no
/// line is longer than it may be.
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    let (size, data) = data.split_first().map_or((1, data), |(size, rest)| (usize::from(*size) + 1, rest));
    let mut lines = lines::Lines::new(wire::MAX_LINE);
    for part in data.chunks(size) {
        lines.push(part);
        while let Some(line) = lines.next_line() {
            let Ok(line) = line else { return };
            assert!(line.len() <= wire::MAX_LINE);
            match wire::parse(&line) {
                Ok((_, request)) => {
                    let text = serde_json::to_vec(&wire::Call { id: 1, request: &request }).expect("JSON");
                    wire::parse(&text).expect("what was read can be written and read again");
                }
                Err((_, refusal)) => assert!(!refusal.message.is_empty()),
            }
        }
    }
}
