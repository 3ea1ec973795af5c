//! Where a group of warps waits for products that it has begun.
//!
//! `wgmma` is asynchronous: its sum must not be touched, nor its factors changed or released, until it is over. The program is
//! sequential, so what each op needs is known here, and products end in the order in which they began: an op waits until only
//! those are left that began after the last one that it needs (`wgmma.wait_group`).

use std::collections::HashMap;
use vm_ir::Kernel;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::Shape;

/// What is waited for, by op and by region.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// How many products may be left before the op.
    before: HashMap<*const Op, u32>,
    /// How many may be left where a region ends.
    ends: HashMap<*const Region, u32>,
}

impl Waits {
    pub(super) fn of(kernel: &Kernel) -> Waits {
        let mut walk = Walk { waits: Waits::default() };
        let channels = kernel.tile().map_or(0, |tile| tile.channels.len());
        let mut state = State { pending: Vec::new(), held: vec![0; channels] };
        walk.region(kernel.body(), &mut state);
        walk.waits
    }

    /// The products that may be left before an op; `None` where it needs none to be over.
    pub(super) fn before(&self, op: &Op) -> Option<u32> {
        self.before.get(&std::ptr::from_ref(op)).copied()
    }

    /// The products that may be left where a region ends; `None` where it leaves all that there are.
    pub(super) fn at_end(&self, region: &Region) -> Option<u32> {
        self.ends.get(&std::ptr::from_ref(region)).copied()
    }
}

/// A product that may not be over.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Product {
    sum: Place,
    /// Its first factor, if that is a fragment.
    fragment: Option<Place>,
    /// The stages that it reads: their channels, and how many stages of those are older and not released.
    stages: Vec<(u16, u32)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    /// In the order in which they began.
    pending: Vec<Product>,
    /// By channel: stages that are fetched and not released.
    held: Vec<u32>,
}

struct Walk {
    waits: Waits,
}

impl Walk {
    fn region(&mut self, region: &Region, state: &mut State) {
        region.ops.iter().for_each(|op| self.op(op, state));
    }

    /// Waits before an op until all are over that fit.
    fn need(&mut self, op: &Op, state: &mut State, fits: impl Fn(&Product) -> bool) {
        let Some(last) = state.pending.iter().rposition(fits) else { return };
        let left = (state.pending.len() - 1 - last) as u32;
        let most = self.waits.before.entry(op).or_insert(left);
        *most = left.min(*most);
        state.pending.drain(..=last);
    }

    /// The op fills a stage of a channel.
    fn held(&mut self, op: &Op, state: &mut State) {
        if let Some(Place::Channel(i)) = op.others.first() {
            state.held[usize::from(*i)] += 1;
        }
    }

    fn op(&mut self, op: &Op, state: &mut State) {
        let others = || op.place.iter().chain(&op.others).copied();
        match op.code.shape() {
            Shape::Fetch => self.held(op, state),
            Shape::Release => {
                let Some(Place::Channel(channel)) = op.place else { return };
                self.need(op, state, |product| product.stages.contains(&(channel, 0)));
                state.held[usize::from(channel)] = state.held[usize::from(channel)].saturating_sub(1);
                let stages = state.pending.iter_mut().flat_map(|product| &mut product.stages);
                stages.filter(|(of, _)| *of == channel).for_each(|(_, older)| *older -= 1);
            }
            Shape::Mma => {
                let Some(sum) = op.place else { return };
                // Sums of one fragment follow each other; that it is a factor elsewhere must be over.
                self.need(op, state, |product| product.fragment == Some(sum));
                let factor = op.others.first().copied().filter(|place| matches!(place, Place::Fragment(_)));
                self.need(op, state, |product| factor == Some(product.sum));
                let stages = op.others.iter().filter_map(|place| match place {
                    Place::Channel(i) => Some((*i, state.held[usize::from(*i)].saturating_sub(1))),
                    _ => None,
                });
                let product = Product { sum, fragment: factor, stages: stages.collect() };
                state.pending.push(product);
            }
            Shape::Fill
            | Shape::Map
            | Shape::Rows
            | Shape::Share
            | Shape::Put
            | Shape::PutRows
            | Shape::Get
            | Shape::Send => {
                let touched: Vec<Place> = others().collect();
                let written = match op.code.shape() {
                    Shape::Put | Shape::PutRows | Shape::Send => 0,
                    // The view, and the fragment behind it.
                    Shape::Get => 2,
                    Shape::Map => op.immediates.first().map_or(1, |count| *count as usize),
                    _ => 1,
                };
                self.need(op, state, |product| {
                    let changes = product.fragment.is_some_and(|f| touched[..written].contains(&f));
                    changes || touched.contains(&product.sum)
                });
                if op.code.shape() == Shape::Send {
                    self.held(op, state);
                }
            }
            Shape::If | Shape::Switch => self.choice(op, state),
            Shape::For | Shape::While => self.looped(op, state),
            _ => {}
        }
    }

    fn choice(&mut self, op: &Op, state: &mut State) {
        let begin = state.clone();
        let ends = op.regions.iter().map(|region| {
            let mut inside = begin.clone();
            self.region(region, &mut inside);
            inside
        });
        let ends: Vec<State> = ends.collect();
        let Some(kept) = ends.iter().map(|end| end.pending.clone()).reduce(|a, b| newest_of_both(&a, &b))
        else {
            return;
        };
        for (region, end) in op.regions.iter().zip(&ends) {
            if end.pending.len() > kept.len() {
                self.waits.ends.insert(region, kept.len() as u32);
            }
        }
        state.held = ends[0].held.clone();
        state.pending = kept;
    }

    /// What may be pending where an iteration begins is the newest of what was where the loop began, as far as it is the newest of
    /// what is where an iteration ends, too.
    fn looped(&mut self, op: &Op, state: &mut State) {
        loop {
            let mut trial = Walk { waits: Waits::default() };
            let mut end = state.clone();
            op.regions.iter().for_each(|region| trial.region(region, &mut end));
            let kept = newest_of_both(&state.pending, &end.pending);
            if kept.len() == state.pending.len() {
                self.waits.before.extend(trial.waits.before);
                self.waits.ends.extend(trial.waits.ends);
                if end.pending.len() > kept.len()
                    && let Some(last) = op.regions.last()
                {
                    self.waits.ends.insert(last, kept.len() as u32);
                }
                return;
            }
            self.waits.before.insert(op, kept.len() as u32);
            state.pending = kept;
        }
    }
}

/// The longest end that two lists of products have in common.
fn newest_of_both(a: &[Product], b: &[Product]) -> Vec<Product> {
    let same = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    a[a.len() - same..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_ir::op::Opcode;

    /// By op of the kernel, in the order of the text: what it waits for.
    fn check(body: &str, wanted: &[(Opcode, u32)]) {
        let text = format!(
            "vir 1
             kernel @k(@a: view<bf16, [?, ?], read>, @c: view<bf16, [?, ?], write>, %n: i64, %x: f32) at 0 tile(1) {{
               channel @p: bf16[64, 64] stages 4
               channel @q: bf16[64, 64] stages 4
               fragment @s: f32[64, 64]
               fragment @t: f32[64, 64]
               fragment @h: bf16[64, 64]
               {body}
             }}"
        );
        let module = vm_ir::text::parse(&text).unwrap();
        let valid = vm_ir::validate(module, vm_ir::Trust::Guest).unwrap();
        let kernel = &valid.kernels()[0];
        let waits = Waits::of(kernel);
        let mut found = Vec::new();
        kernel.for_each_op(&mut |op| found.extend(waits.before(op).map(|left| (op.code, left))));
        assert_eq!(found, wanted, "{body}");
    }

    const FETCH: &str = "fetch @a[%n, %n], @p\n fetch @a[%n, %n], @q\n";

    #[test]
    fn products_are_waited_for_where_they_are_needed() {
        use Opcode::{Fill, For, Map, Release};
        check(&format!("{FETCH} mma @s, @p, @q\n release @p\n release @q"), &[(Release, 0)]);
        // The older of two is over; the newer goes on.
        check(
            &format!(
                "{FETCH} mma @s, @p, @q\n {FETCH} mma @t, @p, @q\n fill @s, %x\n release @p\n fill @t, %x"
            ),
            &[(Fill, 1), (Fill, 0)],
        );
        // Each iteration releases the stages of the one before.
        let iteration = format!("{FETCH} mma @s, @p, @q\n release @p\n release @q");
        check(
            &format!(
                "{FETCH} mma @s, @p, @q\n for %i: i64 = %n to %n step %n {{ {iteration} }}\n fill @s, %x"
            ),
            &[(Release, 1), (Fill, 0)],
        );
        // Where the first iteration begins otherwise than the next, nothing is left between them.
        check(
            &format!(
                "{FETCH} mma @t, @p, @q\n for %i: i64 = %n to %n step %n {{ {iteration} }}\n fill @s, %x"
            ),
            &[(For, 0)],
        );
        // A branch in which one is waited for leaves those that the other leaves, too.
        check(
            &format!(
                "{FETCH} mma @s, @p, @q\n {FETCH} mma @t, @p, @q\n %c = lt.s %n, %n : bool
                 if %c {{ fill @s, %x }}\n fill @s, %x\n fill @t, %x"
            ),
            &[(Fill, 1), (Fill, 0)],
        );
        // A factor in registers is not changed, and may be read.
        check(
            &format!(
                "{FETCH} mma @s, @h, @q\n map @t = @h (%i, %j, %v) {{ yield %x }}\n map @h = (%k, %l) {{ %w = fpconv %x : bf16 yield %w }}"
            ),
            &[(Map, 0)],
        );
    }
}
