//! What is supported: one row for each instruction.

use super::{Cx, arithmetic, bits, convert, float, memory, print, warp};
use crate::ast::{Instr, Operand, Ty};
use crate::error::{Error, Result};

/// The modifiers of an instruction that nobody has looked at yet.
pub(super) struct Modifiers<'i>(Vec<&'i str>);

impl<'i> Modifiers<'i> {
    /// Is there such a modifier? It is taken.
    pub(super) fn take(&mut self, word: &str) -> bool {
        let found = self.0.iter().position(|m| *m == word);
        found.map(|at| self.0.remove(at)).is_some()
    }

    /// The one of these that is there, if any.
    pub(super) fn one_of(&mut self, words: &[&'static str]) -> Option<&'static str> {
        words.iter().copied().find(|word| self.take(word))
    }

    /// The next type.
    pub(super) fn ty(&mut self) -> Result<Ty> {
        let found = self.0.iter().position(|m| Ty::parse(m).is_some());
        let word = found.map(|at| self.0.remove(at));
        word.and_then(Ty::parse).ok_or_else(|| Error::unsupported(0, "an instruction without a type"))
    }

    /// The first, whatever it is.
    pub(super) fn first(&mut self) -> Option<&'i str> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }

    /// Those that begin so are taken.
    pub(super) fn drop_all(&mut self, begins: &[&str]) {
        self.0.retain(|m| !begins.iter().any(|b| m.starts_with(b)));
    }
}

type Translate = for<'a, 'b, 'i> fn(&Cx<'a, 'b>, &'i Instr, &mut Modifiers<'i>) -> Result<()>;

struct Row {
    /// Instructions, by their first word.
    codes: &'static [&'static str],
    /// What of them.
    forms: &'static str,
    translate: Translate,
}

const TABLE: &[Row] = &[
    Row {
        codes: &["mov"],
        forms: "all types but b128; packs and unpacks vectors; special registers; addresses of variables",
        translate: arithmetic::mov,
    },
    Row { codes: &["argument"], forms: "", translate: arithmetic::argument },
    Row {
        codes: &["add", "sub", "mul"],
        forms: "integers, .sat of s32; .lo .hi .wide; .cc of 32 and 64 bits; floats with .rn .rz .rm .rp (directed ones of f32), .sat",
        translate: arithmetic::add_sub_mul,
    },
    Row { codes: &["addc", "subc"], forms: "32 and 64 bits, .cc", translate: arithmetic::with_carry },
    Row {
        codes: &["mad", "madc"],
        forms: "integers, .lo .hi .wide, .cc; mad of floats as fma",
        translate: arithmetic::mad,
    },
    Row { codes: &["mul24", "mad24"], forms: ".lo .hi", translate: arithmetic::mul24 },
    Row {
        codes: &["fma"],
        forms: "f16, bf16 and their pairs, f32, f64; .rn, of f32 also .rz .rm .rp; .sat .relu",
        translate: float::fma,
    },
    Row {
        codes: &["div", "rem"],
        forms: "integers; floats with .rn, .full and .approx",
        translate: arithmetic::div_rem,
    },
    Row {
        codes: &["abs", "neg", "min", "max"],
        forms: "integers, floats; .NaN, .relu of s32",
        translate: arithmetic::simple,
    },
    Row { codes: &["sad"], forms: "integers", translate: arithmetic::sad },
    Row { codes: &["dp4a", "dp2a"], forms: ".lo .hi of dp2a", translate: arithmetic::dot_product },
    Row {
        codes: &["and", "or", "xor", "not", "cnot"],
        forms: "predicates and integers",
        translate: bits::logic,
    },
    Row { codes: &["shl", "shr"], forms: "16, 32 and 64 bits", translate: bits::shift },
    Row { codes: &["shf"], forms: ".l .r, .wrap .clamp", translate: bits::funnel },
    Row {
        codes: &["bfe", "bfi", "bfind", "brev", "clz", "popc", "szext", "bmsk"],
        forms: "32 and 64 bits",
        translate: bits::bits,
    },
    Row { codes: &["fns"], forms: "b32", translate: bits::find_nth },
    Row { codes: &["prmt"], forms: "without a mode", translate: bits::prmt },
    Row { codes: &["lop3"], forms: "b32", translate: bits::lop3 },
    Row {
        codes: &["setp", "set"],
        forms: "all types and comparisons, .and .or .xor",
        translate: arithmetic::compare,
    },
    Row { codes: &["selp", "slct"], forms: "all types", translate: arithmetic::choose },
    Row { codes: &["testp", "copysign"], forms: "f32, f64", translate: float::test },
    Row {
        codes: &["rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh"],
        forms: ".rn and .approx",
        translate: float::function,
    },
    Row {
        codes: &["cvt"],
        forms: "integers and floats of 16 to 64 bits, and pairs from two f32; pairs of e4m3 and e5m2 from two f32 and from and to f16x2; roundings to integers; .rn, and .rz .rm .rp to f32, except from 64-bit integers, and to 16 bits; .sat .relu",
        translate: convert::cvt,
    },
    Row { codes: &["cvta"], forms: "global, const, shared, local", translate: memory::cvta },
    Row { codes: &["isspacep"], forms: "global, shared, local", translate: memory::isspacep },
    Row {
        codes: &["ld", "ldu"],
        forms: "all spaces, .v2 .v4 .v8; cache hints are ignored; .volatile .relaxed .acquire",
        translate: memory::load,
    },
    Row {
        codes: &["st"],
        forms: "all spaces, .v2 .v4 .v8; cache hints are ignored; .volatile .relaxed .release",
        translate: memory::store,
    },
    Row {
        codes: &["atom", "red"],
        forms: "add min max and or xor exch cas inc dec of 32 and 64 bits, add of f32, f64, f16, bf16 and their pairs",
        translate: memory::atomic,
    },
    Row {
        codes: &["cp"],
        forms: ".async of 4, 8 and 16 bytes from global to shared memory, src-size, ignore-src, .L2::cache_hint; its groups",
        translate: memory::copy,
    },
    Row { codes: &["membar", "fence"], forms: "all scopes but clusters", translate: memory::fence },
    Row {
        codes: &[
            "prefetch",
            "prefetchu",
            "nanosleep",
            "applypriority",
            "discard",
            "pmevent",
            "brkpt",
            "griddepcontrol",
        ],
        forms: "nothing happens",
        translate: memory::nothing,
    },
    Row {
        codes: &["trap"],
        forms: "an access to an address that the launch passes, then an endless loop",
        translate: print::trap,
    },
    Row { codes: &["assert"], forms: "", translate: print::assertion },
    Row { codes: &["print"], forms: "", translate: print::print },
    Row { codes: &["createpolicy"], forms: "all; nothing comes of it", translate: memory::policy },
    Row {
        codes: &["bar", "barrier"],
        forms: ".sync by all threads, of whichever barrier, .warp.sync, .red.popc .and .or",
        translate: warp::barrier,
    },
    Row { codes: &["shfl"], forms: ".sync: .idx .up .down .bfly", translate: warp::shuffle },
    Row { codes: &["vote"], forms: ".sync: .all .any .uni .ballot", translate: warp::vote },
    Row { codes: &["activemask"], forms: "b32", translate: warp::active },
    Row { codes: &["redux"], forms: ".sync: .add .min .max .and .or .xor", translate: warp::reduce },
    Row { codes: &["elect"], forms: ".sync", translate: warp::elect },
    Row { codes: &["match"], forms: ".sync: .any .all", translate: warp::matching },
];

/// Of which instructions which forms are supported; beside these `bra`, `brx.idx`, `ret`, `exit` and `call` of functions of the module.
pub fn supported() -> impl Iterator<Item = (&'static [&'static str], &'static str)> {
    TABLE.iter().filter(|row| !row.forms.is_empty()).map(|row| (row.codes, row.forms))
}

/// Translates an instruction whose predicate holds.
pub(super) fn translate(cx: &Cx<'_, '_>, instr: &Instr) -> Result<()> {
    let code = instr.opcode();
    let Some(row) = TABLE.iter().find(|row| row.codes.contains(&code)) else {
        return Err(cx.unsupported(code));
    };
    let mut modifiers = Modifiers(instr.modifiers().collect());
    // Subnormals are kept, always.
    modifiers.drop_all(&["ftz"]);
    (row.translate)(cx, instr, &mut modifiers)?;
    match modifiers.0.first() {
        Some(left) => Err(cx.unsupported(format!(".{left} of {code}"))),
        None => Ok(()),
    }
}

/// So many operands.
pub(super) fn operands<const N: usize>(instr: &Instr) -> Result<&[Operand; N]> {
    let given = &instr.operands[..];
    given.try_into().map_err(|_| Error::syntax(0, format!("it has {N} operands, not {}", given.len())))
}
