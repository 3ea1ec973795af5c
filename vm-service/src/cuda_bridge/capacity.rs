//! How many programs and file descriptors of the server each peer may use.
//!
//! A peer may use at most [`SHARE`] times what is free afterwards (the dynamic threshold of shared-memory switches, Choudhury and Hahne, 1998). So a single
//! peer can use nearly everything, and a part always stays free for a peer that has nothing yet.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::sockopt::socket_peercred;
use rustix::process::{Resource, getrlimit};

use super::BridgeError;

/// The most programs at a time.
pub(super) const PROGRAMS: usize = 256;
/// Descriptors of a program's session: its connection, two for orders to its worker, one for what the worker asks, the pipe of the worker's log, two for waiting
/// for the worker's end, and one to spare.
pub(super) const SESSION_FILES: usize = 8;
/// Descriptors of a TLS connection: the socket, and both ends of the socket pair that its bytes are pumped through.
pub(super) const TLS_FILES: usize = 3;
/// Descriptors that no peer uses: standard streams, logs, listeners, files of limits, the window, and those of a worker that is being started.
const BASE: u64 = 64;
/// The most descriptors that peers use: each TLS connection also takes a thread.
const MOST_FILES: u64 = 12 << 10;
/// Times what stays free.
const SHARE: u64 = 8;

/// Whether someone who holds `held` may have `wanted` more of something of which `free` is left.
pub(super) fn is_within_share(held: u64, wanted: u64, free: u64) -> bool {
    let left = free.checked_sub(wanted);
    left.is_some_and(|left| held.saturating_add(wanted) <= left.saturating_mul(SHARE))
}

/// The other end of a connection, as its transport proves it.
#[derive(Clone, Eq, Hash, PartialEq)]
pub(super) enum Peer {
    /// A user of this system.
    User(u32),
    /// A guest, by its vsock context id.
    Guest(u32),
    /// A network address; of IPv6 addresses the /64 prefix.
    Address(IpAddr),
    /// The public key of a certificate, in DER. The certificate itself is no identity: anyone can give its ECDSA signature a second valid form.
    Key(Arc<[u8]>),
}

impl fmt::Debug for Peer {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(to, "user {user}"),
            Self::Guest(cid) => write!(to, "guest {cid}"),
            Self::Address(address) => write!(to, "address {address}"),
            Self::Key(_) => to.write_str("a certificate"),
        }
    }
}

impl Peer {
    /// Returns the user at the other end of a Unix socket.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn of_socket(socket: impl AsFd) -> std::io::Result<Self> {
        Ok(Self::User(socket_peercred(socket)?.uid.as_raw()))
    }

    /// Returns the peer of a network address.
    pub(super) fn of_address(address: IpAddr) -> Self {
        const PREFIX: u128 = u128::MAX << 64;
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((address.to_bits() & PREFIX).into()),
            address => address,
        })
    }
}

/// Programs and descriptors.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Amount {
    pub(super) programs: usize,
    pub(super) files: usize,
}

impl Amount {
    /// A program's session.
    pub(super) const SESSION: Self = Self { programs: 1, files: SESSION_FILES };
    /// A TLS connection.
    pub(super) const TLS: Self = Self { programs: 0, files: TLS_FILES };
    /// A recording: its file and the server's end of its socket, and the worker's end while that starts.
    pub(super) const RECORDING: Self = Self { programs: 0, files: 3 };
    /// A file that a program exports.
    pub(super) const FILE: Self = Self { programs: 0, files: 1 };
}

/// What all peers of a server share.
#[derive(Clone, Debug)]
pub(super) struct Capacity(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    all: Amount,
    /// Descriptors of a program with one thread.
    program: usize,
    used: Mutex<HashMap<Peer, Amount>>,
}

impl Inner {
    fn used(&self) -> MutexGuard<'_, HashMap<Peer, Amount>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Capacity {
    /// Derives the capacity from the limit of open files. `waiting` descriptors are for connections that have not shown yet who they are, `program` for each
    /// program with one thread.
    ///
    /// # Errors
    /// When not even two programs fit.
    pub(super) fn new(waiting: usize, program: usize) -> Result<Self, BridgeError> {
        let limit = getrlimit(Resource::Nofile).current;
        let capacity = Self::within(limit, waiting, program)?;
        let Amount { programs, files } = capacity.0.all;
        tracing::info!(programs, descriptors = files, "programs and file descriptors that peers can use");
        if programs < PROGRAMS {
            let needed = (PROGRAMS * program + waiting) as u64 + BASE;
            tracing::warn!(
                "at most {programs} programs can be served: this process may open {} files; for {PROGRAMS} programs raise the hard limit to \
                 {needed} (`ulimit -Hn {needed}`, or LimitNOFILE={needed} in the systemd unit)",
                limit.unwrap_or(u64::MAX)
            );
        }
        Ok(capacity)
    }

    fn within(limit: Option<u64>, waiting: usize, program: usize) -> Result<Self, BridgeError> {
        let limit = limit.unwrap_or(u64::MAX);
        let kept = BASE + waiting as u64;
        let files = limit.saturating_sub(kept).min(MOST_FILES) as usize;
        let programs = (files / program).min(PROGRAMS);
        if programs < 2 {
            return Err(BridgeError::Files { limit, needed: kept + 2 * program as u64 });
        }
        Ok(Self::with(Amount { programs, files }, program))
    }

    fn with(all: Amount, program: usize) -> Self {
        Self(Arc::new(Inner { all, program, used: Mutex::default() }))
    }

    /// Whether no peer uses anything.
    #[cfg(test)]
    pub(super) fn is_unused(&self) -> bool {
        self.0.used().is_empty()
    }

    /// Reserves an amount for a peer until the answer is dropped; `None` when that exceeds its share. A peer's first program may take the last free place and
    /// descriptors; everything else leaves enough for one program.
    pub(super) fn reserve(&self, peer: &Peer, wanted: Amount) -> Option<Reserved> {
        let mut used = self.0.used();
        let sum = |of: fn(&Amount) -> usize| used.values().map(of).sum::<usize>();
        let held = used.get(peer).copied().unwrap_or_default();
        let is_within = |held: usize, wanted: usize, free: usize| {
            is_within_share(held as u64, wanted as u64, free as u64)
        };
        let Inner { all, program, .. } = &*self.0;
        let programs = all.programs.saturating_sub(sum(|of| of.programs));
        let files = all.files.saturating_sub(sum(|of| of.files));
        let left = files.checked_sub(wanted.files)?;
        let has_program = match (held.programs, wanted.programs) {
            (_, 0) => true,
            (0, 1) => programs > 0,
            (held, wanted) => is_within(held, wanted, programs),
        };
        let is_first = held.files + wanted.files <= *program;
        if !has_program || !is_first && (left < *program || !is_within(held.files, wanted.files, files)) {
            return None;
        }
        let held = used.entry(peer.clone()).or_default();
        held.programs += wanted.programs;
        held.files += wanted.files;
        drop(used);
        Some(Reserved { of: self.0.clone(), peer: peer.clone(), amount: wanted })
    }
}

/// An amount that a peer uses until this is dropped.
#[derive(Debug)]
pub(super) struct Reserved {
    of: Arc<Inner>,
    peer: Peer,
    amount: Amount,
}

impl Reserved {
    /// Reserves more for the same peer.
    pub(super) fn more(&self, wanted: Amount) -> Option<Self> {
        Capacity(self.of.clone()).reserve(&self.peer, wanted)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut used = self.of.used();
        if let Some(held) = used.get_mut(&self.peer) {
            held.programs -= self.amount.programs;
            held.files -= self.amount.files;
            if *held == Amount::default() {
                used.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take_all(capacity: &Capacity, peer: &Peer, wanted: Amount) -> Vec<Reserved> {
        std::iter::from_fn(|| capacity.reserve(peer, wanted)).collect()
    }

    #[test]
    fn one_peer_cannot_use_up_programs_or_descriptors() {
        let capacity = Capacity::with(Amount { programs: 128, files: 4096 }, SESSION_FILES);
        let [one, two, three] = [1, 2, 3].map(Peer::User);
        let first = take_all(&capacity, &one, Amount::SESSION);
        assert_eq!(first.len(), 113);
        let second = take_all(&capacity, &two, Amount::SESSION);
        assert_eq!(second.len(), 13);
        assert_eq!(take_all(&capacity, &three, Amount::SESSION).len(), 1);
        // Descriptors run out on their own, too.
        let certificate = Peer::Key([1, 2, 3][..].into());
        let files = take_all(&capacity, &certificate, Amount::TLS).len() * TLS_FILES;
        let free = 4096 - (113 + 13) * SESSION_FILES;
        assert!(files > free * 3 / 4 && files < free, "{files} of {free}");
        drop((first, second));
        assert!(capacity.is_unused());
        assert_eq!(take_all(&capacity, &three, Amount::SESSION).len(), 113);
    }

    #[test]
    fn programs_that_fit_follow_from_the_limit_of_open_files() {
        let all = |limit, waiting| {
            Capacity::within(limit, waiting, SESSION_FILES).map(|capacity| capacity.0.all).ok()
        };
        assert_eq!(all(Some(1024), 128), Some(Amount { programs: 104, files: 832 }));
        assert_eq!(all(Some(1 << 20), 128), Some(Amount { programs: PROGRAMS, files: 12288 }));
        assert_eq!(all(None, 0), Some(Amount { programs: PROGRAMS, files: 12288 }));
        assert_eq!(all(Some(207), 128), None);
        assert_eq!(all(Some(208), 128), Some(Amount { programs: 2, files: 16 }));
        let error = Capacity::within(Some(100), 128, SESSION_FILES).expect_err("too few").to_string();
        assert!(error.contains("may open 100") && error.contains("LimitNOFILE=208"), "{error}");
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_peer() {
        let of = |text: &str| Peer::of_address(text.parse().expect("an address"));
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[test]
    fn few_descriptors_let_a_second_peer_run_a_program() {
        const PROGRAM: usize = SESSION_FILES + 2 * TLS_FILES;
        let capacity = Capacity::within(Some(BASE + 2 * PROGRAM as u64), 0, PROGRAM).expect("two programs");
        let peers = [1, 2].map(|key| Peer::Key([key][..].into()));
        // A program with one thread reserves these in turn.
        for peer in &peers {
            for wanted in [Amount::TLS, Amount::SESSION, Amount::TLS] {
                let reserved = capacity.reserve(peer, wanted);
                assert!(reserved.is_some(), "{peer:?} {wanted:?}");
                std::mem::forget(reserved);
            }
        }
        assert!(capacity.reserve(&peers[0], Amount::TLS).is_none());
    }

    proptest! {
        /// However peers take and return, a peer without anything finds room as long as fewer peers than the logarithm of the capacity have any.
        #[test]
        fn a_newcomer_finds_room(steps in prop::collection::vec((0u32..3, any::<bool>()), 0..400)) {
            let capacity = Capacity::with(Amount { programs: 256, files: 8192 }, SESSION_FILES);
            let mut held: [Vec<Reserved>; 3] = Default::default();
            for (peer, takes) in steps {
                let held = &mut held[peer as usize];
                if takes {
                    held.extend(capacity.reserve(&Peer::User(peer), Amount::SESSION));
                } else {
                    held.pop();
                }
                prop_assert!(capacity.reserve(&Peer::Guest(9), Amount::SESSION).is_some());
            }
        }
    }
}
