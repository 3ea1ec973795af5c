//! A client of the daemon, as the commands are.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use vm_passthrough::Host;

use super::socket_of;
use crate::api::{GuestEvent, Problem, Refusal};
use crate::failure::Failure;

/// Most bytes of an answer.
const MAX_ANSWER: usize = 16 << 20;

/// The daemon of a host.
pub(crate) struct Api {
    socket: PathBuf,
    /// How such a daemon is started.
    start: &'static str,
    runtime: Runtime,
}

/// Why the daemon did not do it.
#[derive(Debug)]
pub(crate) enum ApiError {
    /// It says why.
    Refused(Refusal),
    /// It can't be asked, or its answer can't be read.
    Failed(Failure),
}

type Result<T, E = ApiError> = std::result::Result<T, E>;

fn failed(error: impl std::fmt::Display) -> ApiError {
    ApiError::Failed(Failure::failed(error))
}

impl Api {
    /// The daemon that listens on this socket, or where one of this host does.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub(crate) fn new(host: &Host, named: Option<&PathBuf>) -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::failed(format_args!("{error}; raise `ulimit -n`")))?;
        let is_usual = named.is_none() && host.state == Host::system().state;
        let start = match is_usual {
            true => "`systemctl start vm-service.socket`, or `vm-service serve`",
            false => "`vm-service serve` with the same `--state` and `--socket`",
        };
        Ok(Self { socket: socket_of(host, named), start, runtime })
    }

    /// Asks for something, and waits `deadline` for the answer.
    ///
    /// # Errors
    /// What the daemon says, and when it does not answer.
    pub(crate) fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &impl Serialize,
        body: Option<&impl Serialize>,
        deadline: Duration,
    ) -> Result<T> {
        let query = serde_html_form::to_string(query).map_err(failed)?;
        let body = body.map(serde_json::to_vec).transpose().map_err(failed)?.unwrap_or_default();
        let call = async {
            let response = self.send(method, &format!("{path}?{query}"), body).await?;
            let status = response.status();
            let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER).collect().await;
            let body =
                body.map_err(|error| failed(format_args!("the daemon's answer can't be read: {error}")))?;
            match status.is_success() {
                true => serde_json::from_slice(&body.to_bytes())
                    .map_err(|error| failed(format_args!("the daemon's answer is not understood: {error}"))),
                false => Err(refusal(status, &body.to_bytes())),
            }
        };
        let late = || failed(format_args!("the daemon did not answer within {} s", deadline.as_secs()));
        self.runtime
            .block_on(async { tokio::time::timeout(deadline, call).await })
            .unwrap_or_else(|_| Err(late()))
    }

    /// Hands on what happens from when `begins` is called, until `take` fails or the daemon ends.
    ///
    /// # Errors
    /// When the daemon can't be asked, and when `take` failed.
    pub(crate) fn events(
        &self,
        begins: impl FnOnce(),
        mut take: impl FnMut(GuestEvent) -> Result<(), Failure>,
    ) -> Result<()> {
        self.runtime.block_on(async {
            let response = self.send(Method::GET, "/v1/events", Vec::new()).await?;
            let status = response.status();
            let mut body = response.into_body();
            if !status.is_success() {
                let body = body.collect().await.map_err(failed)?;
                return Err(refusal(status, &body.to_bytes()));
            }
            begins();
            let mut text = Vec::new();
            while let Some(frame) = body.frame().await {
                let Ok(frame) = frame else { break };
                text.extend(frame.data_ref().into_iter().flatten());
                while let Some(end) = text.iter().position(|&byte| byte == b'\n') {
                    let line: Vec<u8> = text.drain(..=end).collect();
                    if let Some(event) = line.strip_prefix(b"data: ") {
                        take(serde_json::from_slice(event).map_err(failed)?).map_err(ApiError::Failed)?;
                    }
                }
                if text.len() > MAX_ANSWER {
                    return Err(failed("the daemon sends a line without an end"));
                }
            }
            Err(failed("the daemon ended"))
        })
    }

    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Response<Incoming>> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
        let peer = stream.peer_cred().map(|peer| peer.uid());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to the daemon ended");
            }
        });
        let request = Request::builder().method(method).uri(path).header("host", "localhost");
        let request = request.header("content-type", "application/json").body(Full::new(Bytes::from(body)));
        let sent = sender.send_request(request.map_err(failed)?).await;
        sent.map_err(|error| match (rustix::process::geteuid().as_raw(), peer) {
            (own, Ok(peer)) if own != 0 && own != peer => failed(format_args!(
                "the daemon at {} did not answer: it serves root and its own user, {peer}, and this is user {own}",
                self.socket.display()
            )),
            _ => failed(format_args!(
                "the daemon ended before it answered: {error}; what was asked may have been done all the same: see \
                 `vm-service guests` once it serves again"
            )),
        })
    }

    fn unreachable(&self, error: &io::Error) -> ApiError {
        failed(format_args!(
            "no daemon can be reached at {}: {error}; start it ({})",
            self.socket.display(),
            self.start
        ))
    }
}

/// What a problem document says.
fn refusal(status: hyper::StatusCode, body: &[u8]) -> ApiError {
    match serde_json::from_slice::<Problem>(body) {
        Ok(Problem { code, detail, field, blockers, .. }) => {
            ApiError::Refused(Refusal { code, message: detail, field, blockers })
        }
        Err(_) => failed(format_args!("the daemon answered {status}")),
    }
}
