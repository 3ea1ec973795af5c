//! Serves CUDA programs over the bridge: each by a worker, a process of its own, which opens the driver.
//!
//! A worker has no more than its connection. It gives up what a driver's library can do without: new privileges, core dumps, its user, and files
//! but libraries and the driver's own nodes. Which of these the driver does without is tried once, before the first program is served.

mod capacity;
mod gateway;
mod guest;
mod limits;
mod replay;
mod serve;
mod tls;
mod waiting;
mod window;
mod worker;
mod workers;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;
use vm_bridge::recording::{BadRecording, ReplayError};
use vm_bridge::server::{OpenError, SessionError};

pub(crate) use guest::serve as serve_guest;
pub(crate) use limits::Limits;
pub(crate) use replay::replay;
pub(crate) use serve::{Places, serve};
pub(crate) use tls::Tls;
pub(crate) use worker::main as worker_main;

/// Why programs can't be served.
#[derive(Debug, Error)]
pub(crate) enum BridgeError {
    /// There is no socket.
    #[error("the socket {path} can't be made: {source}; name another by --socket or --stream")]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Nothing can be listened at over vsock.
    #[error(
        "the port {port} of vsock can't be listened at: {source}; load vhost_vsock, or name another port by --vsock"
    )]
    Vsock {
        /// Which.
        port: u32,
        /// Why not.
        source: io::Error,
    },
    /// Nothing can be listened at over TCP.
    #[error("{address} can't be listened at: {source}; name another address of this machine by --tls")]
    Address {
        /// Which.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The certificates are wrong.
    #[error("nothing can be served over TLS: {0}")]
    Tls(String),
    /// This process may open too few files.
    #[error(
        "no programs can be served: this process may open {limit} files, and two programs and connections that wait take {needed}; raise the hard limit \
         (`ulimit -Hn`, or LimitNOFILE={needed} in the systemd unit)"
    )]
    Files {
        /// How many.
        limit: u64,
        /// How many it needs.
        needed: u64,
    },
    /// There is no memory for a window.
    #[error("the window can't be made: {0}; make it smaller by --window")]
    Window(io::Error),
    /// A server listens there.
    #[error("a server listens on {0} already; name another socket by --socket or --stream")]
    Taken(PathBuf),
    /// The driver does not open, however little a worker gives up.
    #[error("the CUDA driver {0} does not open in a worker; its messages above say why")]
    Driver(PathBuf),
    /// What workers have of the device's memory and time can't be counted.
    #[error("the memory and the time of the device can't be shared out: {0}; see `ulimit -n`")]
    Share(io::Error),
    /// There is no room for a recording.
    #[error("the recording {path} can't be written: {source}; name a folder that is there by --record")]
    Record {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The recording can't be read.
    #[error("the recording {path} can't be read: {source}")]
    Read {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It is none.
    #[error(transparent)]
    Recording(#[from] BadRecording),
    /// It can't be replayed.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The worker can't be started.
    #[error("a worker can't be started: {0}; see `ulimit -n` and `ulimit -u`")]
    Worker(io::Error),
    /// The worker has no connection to its server.
    #[error(
        "the worker has no connection to its server: {0}; it is started by `vm-service bridge serve` alone"
    )]
    Server(io::Error),
    /// The worker can't be confined.
    #[error("the worker can't be confined: {0}")]
    Confine(String),
    /// There is no thread that ends a worker.
    #[error("no thread can be started that ends a worker: {0}; see `ulimit -u`")]
    Thread(io::Error),
    /// What kernels print has no way to their program.
    #[error("what kernels print can't be taken: {0}; see `ulimit -n` and `ulimit -u`")]
    Print(io::Error),
    /// The driver does not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The driver has no GPU.
    #[error("the CUDA driver does not start: {0}; see whether `nvidia-smi` shows a GPU")]
    Init(u32),
    /// The program's connection failed.
    #[error(transparent)]
    Session(#[from] SessionError),
}
