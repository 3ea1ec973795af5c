//! HTTP/1.1 on the daemon's socket, with bounds: connections, the time that a request's head may take, and the time that a
//! client may leave its responses unread.

use std::io;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::sync::watch::Receiver;
use tokio::time::Sleep;

use super::socket::Listening;
use crate::deadlines::API_CLIENT;
use crate::guest::control::{self, Caller};

/// Most connections at once; others wait.
const MAX_CONNECTIONS: usize = 256;
/// How long no connection is accepted where this process has no descriptors left.
const NO_DESCRIPTORS: Duration = Duration::from_secs(1);

/// Serves connections until it is asked to stop. Looks as often whether its state directory is there.
///
/// # Errors
/// When the socket can't be used, and when the directory has gone.
pub(super) async fn serve(
    listening: Listening,
    router: Router,
    interval: Duration,
    mut stopped: Receiver<bool>,
) -> io::Result<()> {
    let listener = UnixListener::from_std(listening.listener.try_clone()?)?;
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut looks = tokio::time::interval(interval);
    loop {
        let accepted = tokio::select! {
            _ = stopped.wait_for(|stopped| *stopped) => return Ok(()),
            _ = looks.tick() => {
                listening.check_state()?;
                continue;
            }
            accepted = accept(&listener, &connections) => accepted,
        };
        let (stream, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("no connection is accepted for a while: {error}");
                tokio::time::sleep(NO_DESCRIPTORS).await;
                continue;
            }
        };
        if !control::is_trusted(&stream) {
            continue;
        }
        let caller = match stream.as_fd().try_clone_to_owned() {
            Ok(socket) => Caller::new(socket),
            Err(error) => {
                tracing::warn!("cannot serve a connection: {error}; raise `ulimit -n`");
                continue;
            }
        };
        let router = TowerToHyperService::new(router.clone());
        let service = service_fn(move |mut request: hyper::Request<_>| {
            request.extensions_mut().insert(caller.clone());
            router.call(request)
        });
        tokio::spawn(async move {
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(API_CLIENT)
                // Who has said all that it has to say may close its half.
                .half_close(true)
                .serve_connection(TokioIo::new(Client { stream, full: None }), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "a connection ended");
            }
            drop(permit);
        });
    }
}

async fn accept(
    listener: &UnixListener,
    connections: &Arc<Semaphore>,
) -> io::Result<(UnixStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = connections.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

/// A client's connection. A write to it fails if the client reads nothing for [`API_CLIENT`].
#[derive(Debug)]
struct Client {
    stream: UnixStream,
    /// Ends when the client has read nothing for too long; `None` while the socket has room.
    full: Option<Pin<Box<Sleep>>>,
}

impl Client {
    fn write(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut UnixStream>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let written = write(Pin::new(&mut self.stream), context);
        if written.is_ready() {
            self.full = None;
            return written;
        }
        let full = self.full.get_or_insert_with(|| Box::pin(tokio::time::sleep(API_CLIENT)));
        ready!(full.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its responses")))
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Client {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| stream.poll_write_vectored(context, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
