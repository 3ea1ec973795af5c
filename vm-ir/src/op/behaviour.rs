//! What an op does beside its result, with what that varies, and which threads must reach it: a column
//! of the op table, so that an op does not compile until its row says it.

/// What an op does beside giving a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: it may be removed, repeated and moved.
    Pure,
    /// Nothing, but its result is another each time: it may be removed, and neither repeated nor moved.
    Volatile,
    /// Reads memory.
    Read,
    /// Writes memory, or reads and writes it.
    Write,
    /// Communicates or synchronises with other threads; may not move across control flow.
    Convergent,
    /// Contains regions, whose ops say.
    Regions,
}

/// With what the result of an op varies. Of an op without a result it says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Varies {
    /// With its operands.
    Operands,
    /// From block to block: it is uniform in a block.
    Block,
    /// From warp to warp: it is uniform in a warp.
    Warp,
    /// From thread to thread.
    Thread,
    /// With its indices if nothing writes the memory during the launch, else from thread to thread.
    Memory,
    /// With its operands, and with what the regions yield.
    Regions,
}

/// Which threads must reach an op together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Convergence {
    /// None.
    None,
    /// The whole warp, or none of it.
    Warp,
    /// The whole block, or none of it.
    Block,
    /// Those of its [`BarrierScope`](super::BarrierScope).
    Scope,
}

/// The column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behaviour {
    /// What it does beside giving a result.
    pub effect: Effect,
    /// With what its result varies. That of a `shuffle` from one lane, uniform in the warp, is uniform in the warp
    /// whatever its value; the validator knows that by itself.
    pub varies: Varies,
    /// Which threads must reach it together.
    pub convergence: Convergence,
}

const fn behaviour(effect: Effect, varies: Varies, convergence: Convergence) -> Behaviour {
    Behaviour { effect, varies, convergence }
}

/// Computes from its operands alone.
pub(super) const PURE: Behaviour = behaviour(Effect::Pure, Varies::Operands, Convergence::None);
/// A number that all threads of a block share.
pub(super) const OF_BLOCK: Behaviour = behaviour(Effect::Pure, Varies::Block, Convergence::None);
/// A number that all threads of a warp share.
pub(super) const OF_WARP: Behaviour = behaviour(Effect::Pure, Varies::Warp, Convergence::None);
/// A number that each thread has of its own.
pub(super) const OF_THREAD: Behaviour = behaviour(Effect::Pure, Varies::Thread, Convergence::None);
/// Another number each time.
pub(super) const VOLATILE: Behaviour = behaviour(Effect::Volatile, Varies::Thread, Convergence::None);
/// A load.
pub(super) const LOAD: Behaviour = behaviour(Effect::Read, Varies::Memory, Convergence::None);
/// A load that others may write between.
pub(super) const ATOMIC_LOAD: Behaviour = behaviour(Effect::Read, Varies::Thread, Convergence::None);
/// A store.
pub(super) const STORE: Behaviour = behaviour(Effect::Write, Varies::Operands, Convergence::None);
/// A load and a store in one.
pub(super) const ATOMIC: Behaviour = behaviour(Effect::Write, Varies::Thread, Convergence::None);
/// Orders memory; each thread by itself.
pub(super) const FENCE: Behaviour = behaviour(Effect::Convergent, Varies::Operands, Convergence::None);
/// Gives each thread of a warp another's value.
pub(super) const SHUFFLE: Behaviour = behaviour(Effect::Convergent, Varies::Operands, Convergence::Warp);
/// Gives all threads of a warp one value, of all of theirs.
pub(super) const REDUCE: Behaviour = behaviour(Effect::Convergent, Varies::Warp, Convergence::Warp);
/// Gives all threads of a block one value.
pub(super) const BROADCAST: Behaviour = behaviour(Effect::Convergent, Varies::Block, Convergence::Block);
/// Waits for all threads of its scope.
pub(super) const BARRIER: Behaviour = behaviour(Effect::Convergent, Varies::Operands, Convergence::Scope);
/// What a block of a tile kernel does as a whole.
pub(super) const TILE: Behaviour = behaviour(Effect::Convergent, Varies::Operands, Convergence::Block);
/// Contains regions.
pub(super) const REGIONS: Behaviour = behaviour(Effect::Regions, Varies::Regions, Convergence::None);
