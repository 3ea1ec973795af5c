//! The static bound of what a launch may cost: what no cancel flag ends must end by itself.
//!
//! A compiler says how much a thread of a kernel does at most before it ends or polls the cancel flag, in operations
//! weighed by what they take. A launch is refused when that would take much longer than its deadline.

use std::time::Duration;

use vm_accel::Signature;
use vm_paravirt::Status;

/// Operations a second of one thread, when each waits for the one before.
const THREAD: u64 = 1 << 25;
/// Of one block, which has a single core.
const BLOCK: u64 = 1 << 32;
/// Of a launch: a twentieth of what a kernel reaches that moves memory as fast as a large GPU can. One whose threads all
/// reach far apart is slower, and may be some times late.
const LAUNCH: u64 = 1 << 43;
/// Of a launch that reaches the guest's own memory, over the bus.
const BUS: u64 = 1 << 39;

/// Sees that a launch ends in time.
///
/// # Errors
/// When it may not, with what to do.
pub(super) fn check(
    signature: &Signature,
    grid: [u32; 3],
    over_bus: bool,
    deadline: Duration,
) -> Result<(), (Status, String)> {
    let product = |sizes: [u32; 3]| sizes.iter().fold(1u128, |all, size| all * u128::from(*size));
    let thread = u128::from(signature.cost_bound);
    let block = thread.saturating_mul(product(signature.block));
    let launch = block.saturating_mul(product(grid));
    let remedy = "launch fewer blocks at a time";
    let loops = "give its loops bounds that only a launch knows: those are cancellable";
    let parts = [
        ("thread", thread, THREAD, loops),
        ("block", block, BLOCK, loops),
        ("launch", launch, if over_bus { BUS } else { LAUNCH }, remedy),
    ];
    for (what, cost, rate, remedy) in parts {
        let most = deadline.as_micros().saturating_mul(rate.into()) / 1_000_000;
        if cost > most {
            let text = format!(
                "the kernel {}: a {what} may take {cost} operations before it can be stopped, and its deadline of {deadline:?} \
                 leaves {most}; {remedy}",
                signature.entry
            );
            return Err((Status::Deadline, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vm_accel::programs::Program;

    use super::*;

    #[test]
    fn what_may_not_end_in_time_is_refused() {
        let second = Duration::from_secs(1);
        let most = [i32::MAX as u32, 65535, 65535];
        let check = |work, block, grid, over_bus, deadline, refused: Option<&str>| {
            let signature = Signature { cost_bound: work, block, ..Program::Add.signature() };
            let shown = format!("{work} {block:?} {grid:?} {over_bus} {deadline:?}");
            match (check(&signature, grid, over_bus, deadline), refused) {
                (Ok(()), None) => {}
                (Err((Status::Deadline, text)), Some(what)) => {
                    assert!(text.contains(&format!("a {what} may take")), "{shown}: {text}");
                }
                (result, _) => panic!("{shown}: {result:?}"),
            }
        };
        // A thread.
        check(1 << 25, [1; 3], [1; 3], false, second, None);
        check((1 << 25) + 1, [1; 3], [1; 3], false, second, Some("thread"));
        check((1 << 25) + 1, [1; 3], [1; 3], true, 2 * second, None);
        check(u64::MAX, [1; 3], [1; 3], false, Duration::from_secs(3600), Some("thread"));
        check(u64::MAX, [1024, 1, 1], most, false, Duration::MAX, Some("launch"));
        // A block.
        check(1 << 22, [1024, 1, 1], [1; 3], false, second, None);
        check((1 << 22) + 1, [1024, 1, 1], [1; 3], false, second, Some("block"));
        // All of it.
        check(64, [256, 1, 1], [1 << 20, 512, 1], false, second, None);
        check(64, [256, 1, 1], [1 << 20, 512, 2], false, second, Some("launch"));
        check(64, [256, 1, 1], [1 << 20, 64, 1], true, second, Some("launch"));
        check(64, [256, 1, 1], [1 << 20, 32, 1], true, second, None);
        check(0, [1; 3], most, false, Duration::ZERO, None);
        check(16, [1; 3], most, false, Duration::from_secs(3600), Some("launch"));
    }
}
