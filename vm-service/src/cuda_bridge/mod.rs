//! Serves CUDA programs over the bridge: each by a worker, a process of its own, which opens the driver.
//!
//! A worker has no more than its connection. It gives up new privileges, core dumps, its user, all files but libraries and the driver's own nodes,
//! and all system calls but listed ones. A server whose driver does not open in such a worker does not start, unless the operator waives a part by name.

mod capacity;
mod gateway;
mod guest;
mod limits;
mod records;
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
pub(crate) use records::RecordOptions;
pub(crate) use replay::replay;
pub(crate) use serve::{Places, serve};
pub(crate) use tls::Tls;
pub(crate) use worker::main as worker_main;

use crate::os::socket::ListenError;

/// Why programs can't be served.
#[derive(Debug, Error)]
pub(crate) enum BridgeError {
    /// There is no socket.
    #[error(transparent)]
    Socket(#[from] ListenError),
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
    /// The driver does not open, however little a worker is confined.
    #[error("cannot open the CUDA driver {0} in a worker; its messages above say why")]
    Driver(PathBuf),
    /// The driver's path is that of a FIFO, a device or a directory.
    #[error("cannot read {0}: not a regular file; name the CUDA driver's library by --driver")]
    DriverFile(PathBuf),
    /// The driver opens only in a worker that is less confined.
    #[error(
        "cannot open the CUDA driver {driver} in a confined worker; put it where all users may read it, or run workers \
         without this part of their confinement by `--unconfined {names}`, or `unconfined = [\"{list}\"]` in the \
         accelerator's section of a guest's file"
    )]
    Unconfined {
        /// Which.
        driver: PathBuf,
        /// The measures without which it opens, as the command line has them.
        names: String,
        /// The same as a list of TOML, without the outer quotes.
        list: String,
    },
    /// What workers have of the device's memory and time can't be counted.
    #[error("the memory and the time of the device can't be shared out: {0}; see `ulimit -n`")]
    Share(io::Error),
    /// There is no room for a recording.
    #[error("cannot record into {path}: {source}; name a directory of this user's by --record")]
    Record {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A worker can't record.
    #[error("cannot record the program: {0}")]
    Recorder(io::Error),
    /// It has no calls.
    #[error("the recording {0} has no calls; record the program again by `vm-service bridge serve --record`")]
    NoCalls(PathBuf),
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
    #[error("a worker of the bridge cannot be confined: {0}")]
    Confine(String),
    /// The reader of a recording can't be confined.
    #[error("the reader of the recording cannot be confined: {0}")]
    ConfineReplay(String),
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
