//! Which indices of an access are checked, and why others are not.

use crate::range::{self, Lanes, Ranges};
use vm_ir::Value;
use vm_ir::module::Op;
use vm_ir::op::PlaceRule;

/// Is an index checked?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// Against the extent, or clamped to it.
    Needed,
    /// No: it is known to be in bounds.
    Proven,
    /// No: the module is the host's own.
    Trusted,
}

/// How the index in the last dimension is checked, where as many elements lie as the access has lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// Each lane may be in or out by itself.
    Lanes,
    /// All lanes are in bounds or none is: the first decides.
    First,
    /// By bytes: all are in bounds or none is.
    Bytes {
        /// Against the extent.
        within: bool,
        /// For a multiple of the access's size.
        aligned: bool,
    },
    /// Not at all.
    Unchecked(Check),
}

impl Last {
    /// Is anything checked?
    pub(crate) fn is_checked(self) -> bool {
        !matches!(self, Last::Unchecked(_))
    }
}

/// How an access is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    /// Each index but the last; of a surface each, as the last is that of the lanes.
    pub(crate) outer: Vec<Check>,
    /// The last, with all lanes.
    pub(crate) last: Last,
    /// Bytes of an access by those, which is at a multiple of as many where it is done.
    pub(crate) bytes: Option<u32>,
    /// The index in the last dimension is a multiple of 2 to this.
    pub(crate) shift: u32,
    /// It is this value plus this constant, without overflow.
    pub(crate) base: (Value, i64),
}

impl Access {
    /// Is the index in a dimension but the last checked?
    pub(crate) fn checks(&self, dimension: usize) -> bool {
        self.outer.get(dimension).is_none_or(|check| *check == Check::Needed)
    }

    /// The same access where all of its indices turned out to be in bounds.
    pub(crate) fn proven(self) -> Access {
        let outer = self.outer.iter().map(|_| Check::Proven).collect();
        Access { outer, last: Last::Unchecked(Check::Proven), ..self }
    }
}

/// How an op's access is done; nothing of an op that has none.
pub(super) fn plan(ranges: &Ranges<'_>, op: &Op, guest: bool) -> Option<Access> {
    if !matches!(op.code.shape().place(), PlaceRule::Any | PlaceRule::Shared) {
        return None;
    }
    let (rank, _) = ranges.kernel().place(op.place?)?;
    let last = *op.operands.get(rank.checked_sub(1)?)?;
    if ranges.kernel().surface(op.place?).is_some() {
        // Whoever's the module is: that a pixel out of bounds is nothing is what a surface means.
        let (outer, last_of) = (vec![Check::Needed; rank], Last::Unchecked(Check::Proven));
        return Some(Access { outer, last: last_of, bytes: None, shift: 0, base: (last, 0) });
    }
    let nothing = || range::Access { outer: Vec::new(), lanes: Lanes::Each, shift: 0, base: (last, 0) };
    let known = ranges.access(op).cloned().unwrap_or_else(nothing);
    let check = |proven: bool| match (proven, guest) {
        (true, _) => Check::Proven,
        (false, true) => Check::Needed,
        (false, false) => Check::Trusted,
    };
    let outer = (0..rank - 1).map(|d| check(known.outer.get(d) == Some(&true))).collect();
    let bytes = ranges.kernel().by_bytes(op).map(|ty| ty.bytes());
    let last = match (known.lanes, check(known.lanes == Lanes::All)) {
        (Lanes::Bytes { within, aligned }, Check::Needed) => {
            Last::Bytes { within: !within, aligned: !aligned }
        }
        // Nothing is known of it.
        (_, Check::Needed) if bytes.is_some() => Last::Bytes { within: true, aligned: true },
        (Lanes::Each, Check::Needed) => Last::Lanes,
        (_, Check::Needed) => Last::First,
        (_, unchecked) => Last::Unchecked(unchecked),
    };
    Some(Access { outer, last, bytes, shift: known.shift, base: known.base })
}
