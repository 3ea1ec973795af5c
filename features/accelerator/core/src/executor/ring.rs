//! A bounded queue of commands: many threads push, one runs. A command is a closure stored in the slot itself, so
//! pushing one allocates nothing.
//!
//! The positions are those of Vyukov's bounded queue: slot `i` is free for position `p` when its sequence is `p`,
//! holds the command of position `p` when it is `p + 1`, and becomes free for `p + capacity` when the command has run.
//! The top bit of the tail closes the ring: the compare-and-swap that would claim a slot sees it, so no command slips
//! in after the close.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::sync::{AtomicU64, Ordering, UnsafeCell, spin_loop};

/// Words of a command that fit in a slot. A larger closure is boxed.
const WORDS: usize = 80;

/// The bit of the tail that says that the ring is closed.
const CLOSED: u64 = 1 << 63;

/// Why a command was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Every slot holds a command.
    Full,
    /// The ring takes no more commands.
    Closed,
}

/// Runs the closure that lies at the pointer, or drops it where there is no context.
type Call<C> = unsafe fn(*mut u64, Option<&C>);

struct Command<C> {
    call: MaybeUninit<Call<C>>,
    storage: [MaybeUninit<u64>; WORDS],
}

struct Slot<C> {
    sequence: AtomicU64,
    command: UnsafeCell<Command<C>>,
}

/// The queue. `C` is what each command is given when it runs.
pub(crate) struct Ring<C> {
    slots: Box<[Slot<C>]>,
    mask: u64,
    /// The next position to claim, and the bit [`CLOSED`].
    tail: Aligned<AtomicU64>,
    /// The next position to run. Only the running thread writes it.
    head: Aligned<AtomicU64>,
}

/// Keeps what the pushing threads and the running thread write on cache lines of their own.
#[repr(align(128))]
struct Aligned<T>(T);

// SAFETY: a slot's command is written by the one thread that claimed its position, and read by the one running thread
// after the sequence says so (release, acquire); commands are `Send`.
unsafe impl<C> Send for Ring<C> {}
// SAFETY: as above; `C` itself never lies in the ring.
unsafe impl<C> Sync for Ring<C> {}

impl<C> Ring<C> {
    /// A ring of `capacity` commands, rounded up to a power of two.
    pub(crate) fn new(capacity: usize) -> Self {
        let capacity = capacity.clamp(2, 1 << 20).next_power_of_two() as u64;
        let slots = (0..capacity)
            .map(|position| Slot {
                sequence: AtomicU64::new(position),
                command: UnsafeCell::new(Command {
                    call: MaybeUninit::uninit(),
                    storage: [const { MaybeUninit::uninit() }; WORDS],
                }),
            })
            .collect();
        Self { slots, mask: capacity - 1, tail: Aligned(AtomicU64::new(0)), head: Aligned(AtomicU64::new(0)) }
    }

    /// How many commands fit.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The position that the next command will get: every command pushed so far has a smaller one.
    pub(crate) fn tail(&self) -> u64 {
        self.tail.0.load(Ordering::Acquire) & !CLOSED
    }

    /// The position of the oldest command that has not run.
    pub(crate) fn head(&self) -> u64 {
        self.head.0.load(Ordering::Acquire)
    }

    /// Takes no more commands. Those already pushed will still run.
    pub(crate) fn close(&self) {
        self.tail.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether the ring is closed and every command has run. Only the running thread may ask.
    ///
    /// One load tells both: after two, a command pushed and a close in between would be taken for no command.
    pub(crate) fn is_finished(&self) -> bool {
        self.tail.0.load(Ordering::Acquire) == self.head() | CLOSED
    }

    /// Whether there is nothing to do: no command waits or is being pushed, and the ring is open.
    pub(crate) fn is_idle(&self) -> bool {
        self.tail.0.load(Ordering::Acquire) == self.head()
    }

    /// Appends a command and gives its position.
    ///
    /// # Errors
    /// The command itself, and why it was not taken.
    pub(crate) fn push<F>(&self, command: F) -> Result<u64, (F, Refused)>
    where
        F: FnOnce(&C) + Send + 'static,
    {
        let mut tail = self.tail.0.load(Ordering::Relaxed);
        loop {
            if tail & CLOSED != 0 {
                return Err((command, Refused::Closed));
            }
            let slot = &self.slots[(tail & self.mask) as usize];
            let sequence = slot.sequence.load(Ordering::Acquire);
            if sequence == tail {
                match self.tail.0.compare_exchange_weak(tail, tail + 1, Ordering::AcqRel, Ordering::Relaxed) {
                    Ok(_) => {
                        store(slot, command);
                        slot.sequence.store(tail + 1, Ordering::Release);
                        return Ok(tail);
                    }
                    Err(now) => tail = now,
                }
            } else {
                let now = self.tail.0.load(Ordering::Relaxed);
                if now == tail && sequence < tail {
                    return Err((command, Refused::Full));
                }
                tail = now;
                spin_loop();
            }
        }
    }

    /// Runs the oldest command, after telling its position to `starting`. False when none is ready.
    ///
    /// Only one thread may call this at a time; the executor's `run` sees to it.
    pub(crate) fn run_one(&self, context: Option<&C>, starting: impl FnOnce(u64)) -> bool {
        let head = self.head.0.load(Ordering::Relaxed);
        let slot = &self.slots[(head & self.mask) as usize];
        if slot.sequence.load(Ordering::Acquire) != head + 1 {
            return false;
        }
        starting(head);
        // The slot is freed also when the command panics.
        let _release = Release { ring: self, slot, head };
        slot.command.with_mut(|command| {
            // SAFETY: the sequence says that the slot holds a command that `store` wrote, and this is the only thread
            // that runs commands, so nobody else touches the slot until `Release` gives it back.
            let command = unsafe { &mut *command };
            // SAFETY: `store` wrote `call` before it set the sequence.
            let call = unsafe { command.call.assume_init() };
            // SAFETY: `store` put the closure that `call` was made for into this storage, and it is read once.
            unsafe { call(command.storage.as_mut_ptr().cast(), context) };
        });
        true
    }
}

struct Release<'a, C> {
    ring: &'a Ring<C>,
    slot: &'a Slot<C>,
    head: u64,
}

impl<C> Drop for Release<'_, C> {
    fn drop(&mut self) {
        self.slot.sequence.store(self.head + self.ring.slots.len() as u64, Ordering::Release);
        self.ring.head.0.store(self.head + 1, Ordering::Release);
    }
}

impl<C> Drop for Ring<C> {
    fn drop(&mut self) {
        while self.run_one(None, |_| ()) {}
    }
}

/// Moves a closure into a slot that the caller claimed.
fn store<C, F>(slot: &Slot<C>, command: F)
where
    F: FnOnce(&C) + Send + 'static,
{
    if size_of::<F>() <= size_of::<[u64; WORDS]>() && align_of::<F>() <= align_of::<u64>() {
        place(slot, command);
    } else {
        let boxed = Box::new(command);
        place(slot, move |context: &C| boxed(context));
    }
}

/// Moves a closure that fits into a slot that the caller claimed.
fn place<C, F>(slot: &Slot<C>, command: F)
where
    F: FnOnce(&C) + Send + 'static,
{
    const { assert!(align_of::<Box<u8>>() <= align_of::<u64>()) };
    slot.command.with_mut(|target| {
        // SAFETY: the caller claimed the position, so no other thread touches the slot until its sequence is set.
        let target = unsafe { &mut *target };
        target.call.write(call::<C, F>);
        // SAFETY: `store` checked that size and alignment fit.
        unsafe { target.storage.as_mut_ptr().cast::<F>().write(command) };
    });
}

/// Runs or drops the closure at `storage`.
///
/// # Safety
/// `storage` holds an `F` that nobody reads again.
unsafe fn call<C, F: FnOnce(&C)>(storage: *mut u64, context: Option<&C>) {
    // SAFETY: as the caller promises.
    let command = unsafe { storage.cast::<F>().read() };
    if let Some(context) = context {
        command(context);
    }
}
