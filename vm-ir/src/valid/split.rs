//! Rules on `for.cluster`, whose iterations the blocks of a cluster may share: nothing there may tell whether a block ran all
//! of them or its own alone.
//!
//! So products are all that is done there, of stages that are filled there; and their sums, which a block may have in part, are
//! set and shared elsewhere, and nothing more. Nothing else is shared, since parts are added up. That the iterations fetch the same in
//! all blocks, and that a sum begins as the same, is convergence ([`uniform`](super::uniform)).

use super::check::Checker;
use super::error::Rule;
use crate::module::{Op, Place, Region};
use crate::op::{Opcode, Shape};
use std::collections::{HashMap, HashSet};

impl Checker<'_> {
    /// Checks the loops whose iterations a cluster shares, and what they work on.
    pub(super) fn split(&mut self) {
        let kernel = self.kernel;
        let (mut constants, mut used, mut found) = (HashMap::new(), HashSet::new(), false);
        kernel.for_each_op(&mut |op| {
            found |= matches!(op.code, Opcode::ForCluster | Opcode::Share);
            if let (Opcode::Const, Some(result)) = (op.code, op.result()) {
                constants.insert(result, op.immediates.first().copied().unwrap_or(0));
            }
        });
        if !found {
            return;
        }
        places_of_splits(&kernel.body, false, &mut used);
        let bounds = [0, kernel.cluster.into(), 1];
        let counts = |op: &Op| {
            let given = op.operands.iter().map(|bound| constants.get(bound).copied());
            given.eq(bounds.map(Some))
        };
        self.split_region(&kernel.body, false, &used, &counts);
    }

    fn split_region(
        &mut self,
        region: &Region,
        inside: bool,
        used: &HashSet<Place>,
        counts: &impl Fn(&Op) -> bool,
    ) {
        for op in &region.ops {
            (self.line, self.op) = (op.line, Some(op.code.mnemonic()));
            let is_split = op.code == Opcode::ForCluster;
            if is_split && (inside || !counts(op)) {
                let blocks = self.kernel.cluster;
                self.error(Rule::Split(format!(
                    "counts from the constant 0 to {blocks}, the blocks of a cluster, by 1, carries nothing, and is in no other of its kind"
                )));
            }
            let products = match op.code {
                Opcode::Fetch | Opcode::Release => true,
                Opcode::Mma => op.others.iter().all(|factor| matches!(factor, Place::Channel(_))),
                code => !code.shape().is_tile(),
            };
            if inside && !products {
                self.error(Rule::Split(
                    "has no place in a for.cluster, which adds up products of channels and no more"
                        .to_owned(),
                ));
            }
            let apart = op.code == Opcode::Share && op.place.is_none_or(|to| !used.contains(&to));
            let whole = op.others.first().filter(|sum| apart && !used.contains(sum));
            if let Some(whole) = whole {
                let name = self.kernel.place_name(*whole).to_owned();
                self.error(Rule::Split(format!(
                    "@{name} is no sum of a for.cluster, of which alone the blocks of a cluster have parts to share"
                )));
            }
            let places = op.place.iter().chain(&op.others).filter(|place| used.contains(place));
            for place in places.filter(|_| !inside) {
                let looks = !matches!(
                    (op.code.shape(), op.place == Some(*place)),
                    (Shape::Fill, true) | (Shape::Share, false)
                );
                if looks {
                    let name = self.kernel.place_name(*place).to_owned();
                    self.error(Rule::Split(format!(
                        "@{name} is one of a for.cluster: elsewhere its fragments are filled and shared, and its channels not used"
                    )));
                }
            }
            op.regions.iter().for_each(|region| self.split_region(region, inside || is_split, used, counts));
        }
    }
}

/// The channels and fragments that ops in such loops work on.
pub(super) fn places_of_splits(region: &Region, inside: bool, used: &mut HashSet<Place>) {
    for op in &region.ops {
        if inside {
            let own = op.place.iter().chain(&op.others);
            used.extend(own.filter(|place| matches!(place, Place::Channel(_) | Place::Fragment(_))));
        }
        let inside = inside || op.code == Opcode::ForCluster;
        op.regions.iter().for_each(|region| places_of_splits(region, inside, used));
    }
}
