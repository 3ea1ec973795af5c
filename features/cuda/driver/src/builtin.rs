//! The kernels that the driver has itself, whatever their grid:
//!
//! | kernel | parameters | does |
//! | --- | --- | --- |
//! | `fill` | address, `u64` n, `u32` value | sets n words |
//! | `add` | address dst, address a, address b, `u64` n | adds n words, wrapping |
//! | `copy` | address dst, address src, `u64` n | copies n words |
//! | `sum` | address out, address src, `u64` n | one word: the sum of n, wrapping |
//! | `poll` | address, `u32` expected, `u64` microseconds | spins until a word has the value, or the time is over |
//! | `store` | address, `u32` value | sets a word |
//! | `condition` | `u64` handle, `u32` value | sets a condition of a graph, as `cudaGraphSetConditional` does |
//! | `say` | `u32` value | prints `said `, the value and a line's end |
//! | `fail` | | fails as an assertion does |
//! | `empty` | | nothing |
//! | `large` | 32,000 bytes | nothing |
//!
//! A word is a `u32`, an address a `u64`. A kernel that touches what it may not has done nothing else.

use crate::{
    error::{Error, Result},
    memory::{By, READ_WRITE},
    module::{self, Program, Run, Shape},
    state::{self, State},
    sys,
};
use std::{
    sync::{Arc, MutexGuard},
    thread,
    time::{Duration, Instant},
};

/// All of them.
pub(crate) struct BuiltIn;

impl Program for BuiltIn {
    fn kernels(&self) -> Vec<String> {
        Kernel::ALL.iter().map(|(name, ..)| (*name).to_owned()).collect()
    }

    fn kernel(&self, name: &str) -> Option<Arc<dyn module::Kernel>> {
        let (name, kernel, sizes) = Kernel::ALL.iter().find(|(known, ..)| *known == name)?;
        Some(Arc::new(Named { name, kernel: *kernel, sizes }))
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kernel {
    Fill,
    Add,
    Copy,
    Sum,
    Poll,
    Store,
    Condition,
    Say,
    Fail,
    Empty,
    Large,
}

impl Kernel {
    const ALL: [(&'static str, Self, &'static [usize]); 11] = [
        ("fill", Self::Fill, &[8, 8, 4]),
        ("add", Self::Add, &[8, 8, 8, 8]),
        ("copy", Self::Copy, &[8, 8, 8]),
        ("sum", Self::Sum, &[8, 8, 8]),
        ("poll", Self::Poll, &[8, 4, 8]),
        ("store", Self::Store, &[8, 4]),
        ("condition", Self::Condition, &[8, 4]),
        ("say", Self::Say, &[4]),
        ("fail", Self::Fail, &[]),
        ("empty", Self::Empty, &[]),
        ("large", Self::Large, &[32_000]),
    ];
}

/// A kernel with its name and the sizes of its parameters.
#[derive(Clone, Copy)]
struct Named {
    name: &'static str,
    kernel: Kernel,
    sizes: &'static [usize],
}

impl module::Kernel for Named {
    fn name(&self) -> &str {
        self.name
    }

    fn parameters(&self) -> Vec<(usize, usize)> {
        let mut end = 0usize;
        let place = |size: &usize| {
            let at = end.next_multiple_of(*size);
            end = at + size;
            (at, *size)
        };
        self.sizes.iter().map(place).collect()
    }

    fn attribute(&self, attribute: i32) -> i32 {
        module::without_code(attribute)
    }

    fn prepare(&self, _shape: &Shape) -> Result<Arc<dyn Run>> {
        Ok(Arc::new(*self))
    }
}

impl Run for Named {
    /// `poll` with the state unlocked in between.
    fn run(
        &self,
        mut state: MutexGuard<'static, State>,
        context: u64,
        _grid: [u32; 3],
        parameters: &[u8],
    ) -> (MutexGuard<'static, State>, Result) {
        let mut values = [0; 4];
        for (value, (at, size)) in values.iter_mut().zip(module::Kernel::parameters(self)) {
            let bytes = parameters.get(at..at + size).unwrap_or_default();
            *value = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        }
        if self.kernel == Kernel::Condition {
            let result = state.set_condition(values[0], values[1] as u32);
            return (state, result);
        }
        if self.kernel != Kernel::Poll {
            let result = self.kernel.compute(values, &state, context);
            return (state, result);
        }
        let [at, expected, timeout, _] = values;
        let start = Instant::now();
        loop {
            let Some(word) = state.reach(at, 4, By::Kernel(context), 1, false) else {
                return (state, Err(Error::IllegalAddress));
            };
            let over = start.elapsed() >= Duration::from_micros(timeout) || !state.works(context);
            if word.load(0) == expected as u32 || over {
                return (state, Ok(()));
            }
            drop(state);
            thread::sleep(Duration::from_micros(20));
            state = state::lock();
        }
    }
}

impl Kernel {
    fn compute(self, [a, b, c, d]: [u64; 4], state: &State, context: u64) -> Result {
        let words = |at: u64, count: u64, need| {
            let len = usize::try_from(count)
                .ok()
                .and_then(|count| count.checked_mul(4))
                .filter(|len| *len < 1 << 40);
            len.and_then(|len| state.reach(at, len, By::Kernel(context), need, false))
                .ok_or(Error::IllegalAddress)
        };
        match self {
            Kernel::Fill => words(a, b, READ_WRITE)?.fill(c as u32, 4),
            Kernel::Add => {
                let (dst, x, y) = (words(a, d, READ_WRITE)?, words(b, d, 1)?, words(c, d, 1)?);
                (0..d as usize).for_each(|i| dst.store(i, x.load(i).wrapping_add(y.load(i))));
            }
            Kernel::Copy => words(a, c, READ_WRITE)?.copy_from(words(b, c, 1)?),
            Kernel::Sum => {
                let (out, src) = (words(a, 1, READ_WRITE)?, words(b, c, 1)?);
                out.store(0, (0..c as usize).fold(0, |sum: u32, i| sum.wrapping_add(src.load(i))));
            }
            Kernel::Store => words(a, 1, READ_WRITE)?.store(0, b as u32),
            Kernel::Say => {
                sys::print(format!("said {a}\n").as_bytes());
                sys::flush();
            }
            Kernel::Fail => {
                eprintln!("store.c:7: fail: block: [0,0,0], thread: [0,0,0] Assertion `right` failed.");
                return Err(Error::Assert);
            }
            Kernel::Poll | Kernel::Condition | Kernel::Empty | Kernel::Large => {}
        }
        Ok(())
    }
}
