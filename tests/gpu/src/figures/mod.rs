//! Figures of the spine, each against its peer in the same run.

mod compile;
mod launch;
mod memory;
mod nvrtc;
pub(crate) mod raw;
mod start;

use std::time::Instant;

use crate::table::Sample;
use crate::{Arguments, Test};

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let mut tests = compile::tests();
    tests.extend(start::tests(arguments));
    tests.extend(launch::tests(arguments));
    tests.extend(memory::tests(arguments));
    tests
}

/// Times `f` `count` times, after `warm` times that are not counted; in seconds times `scale`.
fn time(
    count: usize,
    warm: usize,
    scale: f64,
    mut f: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Sample> {
    let mut values = Vec::with_capacity(count);
    for round in 0..warm + count {
        let begin = Instant::now();
        f()?;
        let taken = begin.elapsed().as_secs_f64();
        if round >= warm {
            values.push(taken * scale);
        }
    }
    Ok(Sample::of(values))
}
