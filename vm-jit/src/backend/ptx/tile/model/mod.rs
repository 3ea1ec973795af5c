//! A model of what roles and blocks hand over on Hopper, of which all ways are gone.
//!
//! The writer's rules make programs of a kernel's ops ([`program`]): one for the thread that fetches, one for each warp that
//! computes, with the very numbers of arrivals and waits for products that the writer takes ([`barriers`](super::handover::barriers),
//! [`Waits`](super::waits::Waits)). A [`machine`] runs them in every order. What is asynchronous is a move of its own: what a copy, another
//! block's arrival, a share of a sum or a product comes to, and that the launch is cancelled.
//!
//! At each moment nobody reads what has not come, nothing comes to a stage that may still be read, nothing is under way to a block that has
//! ended, all leave at the same poll, and somebody can go on until all have ended. Every move is one that is not taken back, so
//! where nobody is stuck all end.
//!
//! Not in it: fragments, what is put and got (roles and blocks have no part in that), fuel (which all roles count alike), and what a
//! barrier orders of memory. A warp's 32 threads are one, kernels are small, and a loop polls after each iteration.

mod machine;
mod program;

use machine::{Machine, Wrong};
use program::{Agent, program, rings};

/// A kernel, and how it runs.
struct Case<'a> {
    kernel: &'a str,
    /// What all its numbers are: parameters, extents, and what is loaded.
    number: i64,
    /// Warps of a group.
    warps: u32,
    /// Stages of numbers that were loaded.
    words: u32,
    polls: bool,
}

/// A mistake in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// A warp does not arrive where it releases its first stage.
    NoRelease,
    /// Who fetches counts one stage more than there is.
    StageTooMany,
    /// Blocks of a cluster end without waiting for each other.
    NoGather,
    /// Each role reads the cancel flag by itself.
    OwnPoll,
    /// Those that compute begin with the wrong parity.
    FullParity,
    /// The one that fetches does.
    EmptyParity,
    /// A full stage does not wait for the bytes of copies.
    NoBytes,
    /// Stages are released before the products that read them have ended.
    NoProductWaits,
    /// A multicast stage is released in the own block alone.
    OwnRelease,
    /// The other blocks' roles that fetch are not counted among those that read a signal.
    Listeners,
    /// A signal is given before the one in its stage is read.
    PollUnread,
    /// A word is given back before it is read.
    EmptyBeforeRead,
    /// What other warps sent is read without waiting for it.
    SentUnseen,
    /// Shares of sums come to one buffer though there are several.
    OneBuffer,
}

impl Fault {
    /// Does it need a loop that is polled?
    fn is_of_polls(self) -> bool {
        matches!(self, Fault::OwnPoll | Fault::PollUnread | Fault::Listeners | Fault::NoGather)
    }
}

/// Goes all ways of a case, or those with a mistake until that goes wrong as it must.
fn explore(case: &Case, fault: Option<(Fault, Wrong)>) -> Result<usize, (Wrong, String)> {
    let module =
        vm_ir::text::parse(case.kernel).unwrap_or_else(|error| panic!("{}", error.render(case.kernel)));
    let valid = vm_ir::validate(module, vm_ir::Trust::Guest)
        .unwrap_or_else(|errors| panic!("{}", errors.render(case.kernel)));
    let kernel = &valid.kernels()[0];
    let (fault, wanted) = fault.unzip();
    let rings = rings(kernel, case, fault);
    let blocks = kernel.cluster() as u8;
    let warps = kernel.tile().map_or(0, |tile| tile.groups * case.warps) as u8;
    let of_block = |block| {
        let computing = (0..warps).map(Some);
        std::iter::once(None).chain(computing).map(move |warp| Agent { block, warp })
    };
    let agents: Vec<Agent> = (0..blocks).flat_map(of_block).collect();
    let programs = agents.iter().map(|agent| program(kernel, case, &rings, *agent, fault)).collect();
    Machine::new(blocks, agents, programs, rings, case.polls).explore(wanted)
}

/// An iteration with one channel, whose stage is released when its product has ended.
const ONE: &str = "fetch @a[0, 0], @x
    mma @s, @f, @x
    release @x";
/// One whose stages are released an iteration later, while the next product runs.
const LATER: &str = "fetch @a[0, 0], @x
    mma @s, @f, @x
    release @x ; that of the iteration before";
/// One without a product.
const FETCHED: &str = "fetch @a[0, 0], @x\n    release @x";
/// One in which nothing is handed over but the poll.
const NOTHING: &str = "%next = add %i, 1 : i64";
/// One with two channels, which are released in another order than they are fetched to.
const TWO: &str = "fetch @a[0, 0], @x
    fetch @a[0, 0], @y
    mma @s, @x, @y
    release @y
    release @x";
/// One in which a fragment goes by way of shared memory.
const SENT: &str = "fetch @a[0, 0], @x
    send @f, @z
    product @s, @z, @x
    release @z
    release @x";
/// One whose loop is as long as a number in memory says.
const LOADED: &str = "%l = load @m[0] : i64
    for %j: i64 = 0 to %l step 1 {
      fetch @a[0, 0], @x
      release @x
    }";
/// One of a sum of which both blocks of a cluster have parts.
const SPLIT: &str = "fill @s, 0.0
    for.cluster %c: i64 = 0 to 2 step 1 {
      fetch @a[0, 0], @x
      fetch @a[0, 0], @y
      mma @s, @x, @y
      release @x
      release @y
    }
    share @p, @s";
/// One of such a sum of nothing.
const SHARED: &str = "fill @s, 0.0
    for.cluster %c: i64 = 0 to 2 step 1 {
      for %j: i64 = 0 to 0 step 1 {
        fetch @a[0, 0], @x
        fetch @a[0, 0], @y
        mma @s, @x, @y
        release @x
        release @y
      }
    }
    share @p, @s";

/// A kernel with iterations of `body`. `head` is what stands behind its address, `stages` how many channels have, and what they are.
fn kernel(head: &str, stages: &str, body: &str) -> String {
    // Iterations that begin with a tile more than they bring need one that stands before them, and one that is released behind.
    let (before, behind) = match body {
        LATER => ("fetch @a[0, 0], @x\n  mma @s, @f, @x", "release @x"),
        _ => ("", ""),
    };
    let rows = if head.starts_with("tile(2)") { 128 } else { 64 };
    format!(
        "vir 1
kernel @k(@a: view<bf16, [?, ?], read, align 16>, @m: view<i64, [?], read>, %n: i64) at 0x0 {head} {{
  channel @x: bf16[{rows}, {rows}] stages {stages}
  channel @y: bf16[{rows}, {rows}] stages {stages}
  channel @z: bf16[{rows}, {rows}] stages 1
  fragment @f: bf16[{rows}, {rows}]
  fragment @s: f32[{rows}, {rows}]
  fragment @p: f32[{rows}, {half}]
  {before}
  for %i: i64 = 0 to %n step 1 {{
    {body}
  }}
  {behind}
}}
",
        half = rows / 2
    )
}

const BLOCK: &str = "tile(1)";
const GROUPS: &str = "tile(2)";
const CLUSTER: &str = "tile(1) cluster(2)";

#[test]
fn nothing_goes_wrong() {
    let check = |head: &str, stages: &str, body: &str, most: [i64; 2], warps: u32| {
        let text = kernel(head, stages, body);
        let [without, with] = most.map(|most| 0..=most);
        for (number, polls) in without.map(|number| (number, false)).chain(with.map(|number| (number, true)))
        {
            let case = Case { kernel: &text, number, warps, words: 2, polls };
            let name = format!(
                "{head}, {stages} stages, {number} iterations of {warps} warps, polls: {polls}\n    {body}"
            );
            if let Err((wrong, way)) = explore(&case, None) {
                panic!("{wrong:?} in {name}\n{way}");
            }
        }
    };
    for stages in ["1", "2", "3"] {
        check(BLOCK, stages, ONE, [3, 3], 2);
        check(BLOCK, stages, TWO, [3, 3], 2);
        check(GROUPS, stages, ONE, [3, 3], 1);
        check(GROUPS, stages, TWO, [3, 3], 1);
    }
    for stages in ["2", "3"] {
        check(BLOCK, stages, LATER, [3, 3], 2);
        check(GROUPS, stages, LATER, [3, 3], 1);
    }
    check(BLOCK, "2", SENT, [3, 3], 2);
    check(GROUPS, "1", SENT, [3, 3], 1);
    check(BLOCK, "2", LOADED, [3, 3], 2);
    check(GROUPS, "1", LOADED, [3, 3], 1);
    check(BLOCK, "1", "%l = load @m[0] : i64", [3, 3], 2);
    // Two blocks have thousands of times as many ways as one.
    check(CLUSTER, "1", ONE, [3, 2], 1);
    check(CLUSTER, "2", ONE, [3, 1], 1);
    check(CLUSTER, "1", TWO, [2, 1], 1);
    check(CLUSTER, "1 multicast", FETCHED, [3, 1], 1);
    check(CLUSTER, "2 multicast", FETCHED, [3, 1], 1);
    check(CLUSTER, "1 multicast", ONE, [3, 1], 1);
    check(CLUSTER, "1 multicast", TWO, [2, 0], 1);
    check(CLUSTER, "2 multicast", LATER, [1, 0], 1);
    check("tile(2) cluster(2)", "1 multicast", ONE, [1, 0], 1);
    check(CLUSTER, "1", SPLIT, [2, 0], 1);
    check(CLUSTER, "1", SHARED, [3, 1], 1);
    check("tile(2) cluster(2)", "1", SHARED, [3, 0], 1);
}

#[test]
fn each_mistake_is_found() {
    let check = |fault: Fault, expect: Wrong, head: &str, stages: &str, body: &str| {
        let text = kernel(head, stages, body);
        let case = Case { kernel: &text, number: 3, warps: 1, words: 1, polls: fault.is_of_polls() };
        let found = explore(&case, Some((fault, expect)));
        assert_eq!(
            found.map_err(|(wrong, _)| wrong),
            Err(expect),
            "{fault:?} in {head}, {stages} stages\n    {body}"
        );
    };
    use Fault as F;
    use Wrong::{AfterEnd, Apart, Deadlock, NotThere, Overwritten};
    check(F::NoRelease, Deadlock, BLOCK, "1", ONE);
    check(F::NoRelease, Deadlock, CLUSTER, "1 multicast", ONE);
    check(F::StageTooMany, Overwritten, BLOCK, "2", ONE);
    check(F::FullParity, NotThere, BLOCK, "2", ONE);
    check(F::EmptyParity, Deadlock, BLOCK, "2", ONE);
    check(F::NoBytes, NotThere, BLOCK, "2", ONE);
    check(F::NoProductWaits, Overwritten, BLOCK, "2", ONE);
    check(F::SentUnseen, NotThere, GROUPS, "1", SENT);
    check(F::EmptyBeforeRead, Overwritten, BLOCK, "1", "%l = load @m[0] : i64");
    check(F::PollUnread, Overwritten, BLOCK, "1", NOTHING);
    check(F::OwnPoll, Apart, BLOCK, "1", ONE);
    check(F::OwnPoll, Apart, CLUSTER, "1", NOTHING);
    check(F::NoGather, AfterEnd, CLUSTER, "1", NOTHING);
    check(F::NoGather, AfterEnd, CLUSTER, "1 multicast", ONE);
    check(F::OwnRelease, Overwritten, CLUSTER, "1 multicast", ONE);
    check(F::Listeners, Overwritten, CLUSTER, "1", NOTHING);
    check(F::OneBuffer, NotThere, CLUSTER, "1", SHARED);
}
