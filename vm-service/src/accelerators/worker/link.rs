//! What carries batches to a worker and answers back: the virtqueue, or a stream.

use super::queue::Ring;
use super::server::Answer;
use super::stream::Stream;

/// A batch that arrived.
#[derive(Debug)]
pub(super) struct Request<P> {
    /// The batch, this process's own copy; [`None`] for one that is longer than a batch may be.
    pub(super) batch: Option<Vec<u8>>,
    /// Where its answer goes.
    pub(super) place: P,
    /// Bytes that the answer may have.
    pub(super) room: usize,
}

/// Carries batches and answers.
pub(super) trait Link: Send + Sync + 'static {
    /// Where an answer goes.
    type Place: Send + 'static;

    /// The next batch; waits for one. [`None`] when none will come any more.
    ///
    /// # Errors
    /// When the guest can't be served any more, by nobody.
    fn next(&self) -> Result<Option<Request<Self::Place>>, String>;

    /// Whether [`next`](Self::next) has something without waiting. Asked again and again, by the thread that calls
    /// `next`, before it sleeps there; the guest need not notify of what it offers meanwhile.
    fn ready(&self) -> bool;

    /// Answers a batch.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    fn answer(&self, place: &Self::Place, answer: &Answer) -> Result<(), String>;
}

/// One of the links that there are.
pub(super) enum AnyLink {
    Queue(Ring),
    Stream(Stream),
}
