//! Which op was meant.

use super::{Opcode, Shape, TABLE};
use crate::types::{Class, Scalar};

/// A mnemonic without the sign of its integers.
fn stem(mnemonic: &str) -> &str {
    mnemonic.strip_suffix(".s").or(mnemonic.strip_suffix(".u")).unwrap_or(mnemonic)
}

/// What the first operand of an op may be, where its row says it.
fn class(code: Opcode) -> Option<Class> {
    match code.shape() {
        Shape::Unary(class)
        | Shape::Binary(class)
        | Shape::Ternary(class)
        | Shape::Compare(class)
        | Shape::Reduce(class)
        | Shape::AtomicRmw(class) => Some(class),
        _ => None,
    }
}

impl Opcode {
    /// The mnemonics of the ops that do the same on this type: `lt.s` and `lt.u` for `lt` on integers, `lt` for `lt.s` on
    /// floats.
    pub fn for_type(self, scalar: Scalar) -> Vec<&'static str> {
        let (own, name) = (self.mnemonic(), stem(self.mnemonic()));
        let same = TABLE.iter().filter(|row| row.mnemonic != own && stem(row.mnemonic) == name);
        same.filter(|row| class(row.opcode).is_some_and(|class| class.contains(scalar)))
            .map(|row| row.mnemonic)
            .collect()
    }

    /// The mnemonics that may be meant by a word that is none: those that it lacks the sign of, else the nearest one, if
    /// any is near. The word may have attributes behind it.
    pub fn suggest(word: &str) -> Vec<&'static str> {
        let signed =
            |row: &&super::OpInfo| stem(row.mnemonic) != row.mnemonic && stem(row.mnemonic) == stem(word);
        let signed: Vec<_> = TABLE.iter().filter(signed).map(|row| row.mnemonic).collect();
        if !signed.is_empty() {
            return signed;
        }
        // A longer word is none of the table's, and would only take time.
        if word.len() > 64 {
            return Vec::new();
        }
        let parts = word.match_indices('.').map(|(at, _)| &word[..at]).chain([word]);
        let near = parts.flat_map(|part| {
            TABLE.iter().map(move |row| {
                let distance = strsim::osa_distance(part, row.mnemonic);
                (distance, part.len(), row.mnemonic)
            })
        });
        near.filter(|(distance, length, _)| *distance <= (length / 3).max(1))
            .min_by_key(|(distance, length, _)| (*distance, usize::MAX - length))
            .map(|(_, _, mnemonic)| mnemonic)
            .into_iter()
            .collect()
    }
}

/// Words as alternatives: `a`, `a or b`, `a, b or c`.
pub(crate) fn any_of(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_op_was_meant() {
        let check = |word: &str, expect: &[&str]| assert_eq!(Opcode::suggest(word), expect, "{word}");
        check("rem", &["rem.s", "rem.u"]);
        check("shr", &["shr.s", "shr.u"]);
        check("atomic.min", &["atomic.min.s", "atomic.min.u"]);
        check("addd", &["add"]);
        check("fadd", &["add"]);
        check("thread_idx.x", &["thread_id"]);
        check("thread.x", &[]);
        check("atomic.ad.device", &["atomic.add"]);
        check("atomc.add.relaxed.device", &["atomic.add"]);
        check("shufle.down", &["shuffle.down"]);
        check("frobnicate", &[]);
        check(&"a".repeat(1 << 20), &[]);

        let check = |op: Opcode, scalar, expect: &[&str]| assert_eq!(op.for_type(scalar), expect, "{op:?}");
        check(Opcode::Lt, Scalar::I32, &["lt.s", "lt.u"]);
        check(Opcode::LtS, Scalar::F32, &["lt"]);
        check(Opcode::Abs, Scalar::I8, &["abs.s"]);
        check(Opcode::WarpMax, Scalar::I64, &["warp.max.s", "warp.max.u"]);
        check(Opcode::AtomicMinS, Scalar::F32, &[]);
        check(Opcode::Lt, Scalar::Bool, &[]);
        check(Opcode::Exp, Scalar::I32, &[]);
    }
}
