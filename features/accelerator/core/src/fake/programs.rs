//! The simulated device's kernels: the [programs](Program) of the conformance suite, in Rust.

use vm_abi::Guard;

use super::heap::Heap;
use super::script::Scripted;
use crate::artifact::{ParameterKind, Signature};
use crate::launch::Grid;
use crate::programs::Program;

/// Iterations that a looping kernel takes each time that somebody polls the device.
const ITERATIONS_A_POLL: u64 = 1000;

/// Words of parameters that the programs have at most.
pub(super) const WORDS: usize = 16;

/// How far a kernel has come.
pub(super) enum Progress {
    /// It has ended.
    Done,
    /// It loops on.
    Running,
    /// It touched memory that is not there.
    Fault,
}

/// A launch on the simulated device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) program: Program,
    pub(super) grid: Grid,
    pub(super) words: [u64; WORDS],
    /// Iterations taken so far.
    pub(super) iterations: u64,
    /// What it does instead of the program.
    pub(super) scripted: Option<Scripted>,
}

impl Run {
    /// Runs the kernel on.
    pub(super) fn go(&mut self, heap: &Heap) -> Progress {
        if let Some(scripted) = self.scripted {
            self.iterations = self.iterations.saturating_add(1);
            return scripted.go(self.iterations, heap);
        }
        let done = match self.program {
            Program::Add => add(self, heap),
            Program::Bump => bump(self, heap),
            Program::Copy2 => copy(self, heap, 2),
            Program::Copy3 => copy(self, heap, 3),
            Program::Copy4 => copy(self, heap, 4),
            Program::Scalars => scalars(self, heap),
            Program::Reverse => reverse(self, heap),
            Program::Ids => ids(self, heap),
            Program::Spin => return self.spin(heap).unwrap_or(Progress::Fault),
            Program::Broken => None,
        };
        done.map_or(Progress::Fault, |()| Progress::Done)
    }

    fn spin(&mut self, heap: &Heap) -> Option<Progress> {
        let [output, _, turns, stop, fuel] = *self.words.first_chunk()?;
        if heap.get(stop, 4)? != 0 {
            return Some(Progress::Done);
        }
        self.iterations = self.iterations.saturating_add(ITERATIONS_A_POLL);
        if turns <= fuel && turns <= self.iterations {
            heap.set(output, 4, 1)?;
            return Some(Progress::Done);
        }
        if fuel < self.iterations {
            heap.set(stop, 4, u64::from(Guard::OUT_OF_FUEL))?;
            return Some(Progress::Done);
        }
        Some(Progress::Running)
    }

    /// The view of a rank whose words begin at `first`.
    fn view(&self, first: usize, rank: usize) -> View<'_> {
        let words = &self.words[first..first + 2 * rank];
        View { base: words[0], extents: &words[1..=rank], strides: &words[rank + 1..] }
    }
}

struct View<'a> {
    base: u64,
    extents: &'a [u64],
    strides: &'a [u64],
}

impl View<'_> {
    /// The address of an element of 4 bytes.
    fn at(&self, index: &[u64]) -> u64 {
        let last = index.last().copied().unwrap_or(0);
        let rows: u64 = index.iter().zip(self.strides).map(|(index, stride)| index * stride).sum();
        self.base + rows + 4 * last
    }
}

fn add(run: &Run, heap: &Heap) -> Option<()> {
    let [input, count, output, room, addend] = *run.words.first_chunk()?;
    (0..count.min(room)).try_for_each(|index| {
        let sum = heap.get(input + 4 * index, 4)?.wrapping_add(addend);
        heap.set(output + 4 * index, 4, sum)
    })
}

fn bump(run: &Run, heap: &Heap) -> Option<()> {
    let [data, count, by] = *run.words.first_chunk()?;
    (0..count).try_for_each(|index| {
        let sum = heap.get(data + 4 * index, 4)?.wrapping_add(by);
        heap.set(data + 4 * index, 4, sum)
    })
}

fn copy(run: &Run, heap: &Heap, rank: usize) -> Option<()> {
    let (source, target) = (run.view(0, rank), run.view(2 * rank, rank));
    let mut limits = [1; 4];
    for (limit, (from, to)) in limits.iter_mut().zip(source.extents.iter().zip(target.extents)) {
        *limit = *from.min(to);
    }
    let count: u64 = limits.iter().product();
    (0..count).try_for_each(|number| {
        let mut index = [0; 4];
        let mut left = number;
        for (place, limit) in index.iter_mut().zip(limits).rev() {
            *place = left % limit;
            left /= limit;
        }
        heap.set(target.at(&index[..rank]), 4, heap.get(source.at(&index[..rank]), 4)?)
    })
}

fn scalars(run: &Run, heap: &Heap) -> Option<()> {
    let [output, _, small, d] = *run.words.first_chunk()?;
    let numbers = [small & 0xff, small >> 16 & 0xffff, small >> 32, d];
    numbers
        .into_iter()
        .enumerate()
        .try_for_each(|(index, number)| heap.set(output + 8 * index as u64, 8, number))
}

fn reverse(run: &Run, heap: &Heap) -> Option<()> {
    let data = run.words[0];
    (0..u64::from(run.grid.0[0])).try_for_each(|block| {
        let at = |item: u64| data + 4 * (64 * block + item);
        let mut shared = [0; 64];
        for (item, place) in (0..).zip(&mut shared) {
            *place = heap.get(at(item), 4)?;
        }
        (0..).zip(shared.into_iter().rev()).try_for_each(|(item, value)| heap.set(at(item), 4, value))
    })
}

fn ids(run: &Run, heap: &Heap) -> Option<()> {
    let output = run.view(0, 2);
    let [gx, gy, gz] = run.grid.0.map(u64::from);
    (0..gx * gy * gz).try_for_each(|block| {
        let (bx, by, bz) = (block % gx, block / gx % gy, block / gx / gy);
        (0..16).try_for_each(|item| {
            let (tx, ty, tz) = (item % 4, item / 4 % 2, item / 8);
            let value = bx | by << 4 | bz << 8 | tx << 12 | ty << 16 | tz << 20;
            heap.set(output.at(&[block, item]), 4, value)
        })
    })
}

/// Whether the parameters lie where the kernels here look for them.
pub(super) fn same_layout(given: &Signature, known: &Signature) -> bool {
    let plain = |signature: &Signature| {
        let kinds = signature.parameters.iter().map(|parameter| match &parameter.kind {
            ParameterKind::View { extents, element, .. }
            | ParameterKind::Surface { extents, element, .. } => (extents.len(), Some(*element)),
            ParameterKind::Scalar { .. } => (0, None),
        });
        (kinds.collect::<Vec<_>>(), signature.tiles.clone(), signature.guarded, signature.block)
    };
    plain(given) == plain(known)
}
