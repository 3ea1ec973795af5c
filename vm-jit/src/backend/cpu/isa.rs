//! The machines that code is made for.

use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use std::fmt;
use std::str::FromStr;
use target_lexicon::Triple;

/// A family of machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// AMD's and Intel's.
    X86_64,
    /// Arm's.
    Aarch64,
}

impl Architecture {
    /// Registers for vectors that code may use.
    pub(super) fn vector_registers(self) -> usize {
        match self {
            Architecture::X86_64 => 16,
            Architecture::Aarch64 => 32,
        }
    }
}

/// A machine: its family, and what all that count as it have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// x86-64 with AVX2, FMA and BMI: since 2013 (Intel) and 2015 (AMD).
    X86V3,
    /// The same with AVX-512 F, BW, CD, DQ and VL.
    X86V4,
    /// Any 64-bit Arm.
    Aarch64,
    /// One with atomics as instructions (LSE).
    Aarch64Lse,
}

/// This machine, or the machine that is named, is none that code can be made for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownIsa {
    /// There is no such name.
    #[error("no machine `{0}`; write {names}, or `cpu` alone for this one", names = Isa::names())]
    Name(String),
    /// This machine is older than all that are known.
    #[error("this machine lacks {0}, which code for a CPU needs")]
    Host(&'static str),
    /// The code generator was built without what it needs.
    #[error("the code generator can't make code for `{0}`: it was built without it")]
    Missing(Isa),
}

/// How much the code generator does for a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    /// All it can. What that takes is not linear in the function.
    Thorough,
    /// Only what takes time linear in the function: registers are allocated in one pass over it.
    Linear,
}

/// Flags of x86-64-v3 that the code generator knows.
const V3: &[&str] = &[
    "has_cmpxchg16b",
    "has_sse3",
    "has_ssse3",
    "has_sse41",
    "has_sse42",
    "has_popcnt",
    "has_avx",
    "has_avx2",
    "has_fma",
    "has_bmi1",
    "has_bmi2",
    "has_lzcnt",
];
/// Further ones of x86-64-v4.
const V4: &[&str] = &["has_avx512f", "has_avx512dq", "has_avx512vl"];

impl Isa {
    /// Every one.
    pub const ALL: [Isa; 4] = [Isa::X86V3, Isa::X86V4, Isa::Aarch64, Isa::Aarch64Lse];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::X86V3 => "x86-64-v3",
            Isa::X86V4 => "x86-64-v4",
            Isa::Aarch64 => "aarch64",
            Isa::Aarch64Lse => "aarch64-lse",
        }
    }

    fn names() -> String {
        Isa::ALL.map(|isa| format!("`cpu:{isa}`")).join(", ")
    }

    /// Its family.
    pub const fn architecture(self) -> Architecture {
        match self {
            Isa::X86V3 | Isa::X86V4 => Architecture::X86_64,
            Isa::Aarch64 | Isa::Aarch64Lse => Architecture::Aarch64,
        }
    }

    /// The most that this machine counts as.
    ///
    /// # Errors
    ///
    /// It lacks what the least of them has.
    pub fn host() -> Result<Isa, UnknownIsa> {
        #[cfg(target_arch = "x86_64")]
        {
            macro_rules! all {
                ($($name:tt),*) => {{
                    $(if !std::is_x86_feature_detected!($name) {
                        Err($name)
                    } else)* {
                        Ok(())
                    }
                }};
            }
            let v3: Result<(), &'static str> = all!(
                "cmpxchg16b",
                "sse3",
                "ssse3",
                "sse4.1",
                "sse4.2",
                "popcnt",
                "avx",
                "avx2",
                "fma",
                "bmi1",
                "bmi2",
                "lzcnt"
            );
            v3.map_err(UnknownIsa::Host)?;
            let v4: Result<(), &'static str> =
                all!("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl");
            Ok(if v4.is_ok() { Isa::X86V4 } else { Isa::X86V3 })
        }
        #[cfg(target_arch = "aarch64")]
        {
            let lse = std::arch::is_aarch64_feature_detected!("lse");
            Ok(if lse { Isa::Aarch64Lse } else { Isa::Aarch64 })
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            Err(UnknownIsa::Host("a 64-bit x86 or Arm processor"))
        }
    }

    /// The code generator for it, and how much it does.
    pub(super) fn generator(self, effort: Effort) -> Result<OwnedTargetIsa, UnknownIsa> {
        let mut triple = Triple::unknown();
        triple.architecture = match self.architecture() {
            Architecture::X86_64 => target_lexicon::Architecture::X86_64,
            Architecture::Aarch64 => {
                target_lexicon::Architecture::Aarch64(target_lexicon::Aarch64Architecture::Aarch64)
            }
        };
        triple.operating_system = target_lexicon::OperatingSystem::Linux;
        triple.binary_format = target_lexicon::BinaryFormat::Elf;
        let missing = |_| UnknownIsa::Missing(self);
        let mut shared = settings::builder();
        // Frames are large where many values live; the inline probe needs no function to call.
        let (level, registers) = match effort {
            Effort::Thorough => ("speed", "backtracking"),
            Effort::Linear => ("none", "single_pass"),
        };
        let options = [
            ("opt_level", level),
            ("regalloc_algorithm", registers),
            ("enable_probestack", "true"),
            ("probestack_strategy", "inline"),
            // Done before and behind the optimiser, not in each of its parts.
            ("enable_verifier", "false"),
            ("unwind_info", "false"),
        ];
        for (name, value) in options {
            shared.set(name, value).map_err(|_| UnknownIsa::Missing(self))?;
        }
        let mut builder = cranelift_codegen::isa::lookup(triple).map_err(|_| UnknownIsa::Missing(self))?;
        let flags: Vec<&str> = match self {
            Isa::X86V3 => V3.to_vec(),
            Isa::X86V4 => [V3, V4].concat(),
            Isa::Aarch64 => Vec::new(),
            Isa::Aarch64Lse => vec!["has_lse"],
        };
        for flag in flags {
            builder.enable(flag).map_err(|_| UnknownIsa::Missing(self))?;
        }
        builder.finish(settings::Flags::new(shared)).map_err(missing)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(text: &str) -> Result<Isa, UnknownIsa> {
        let found = Isa::ALL.into_iter().find(|isa| isa.name() == text);
        found.ok_or_else(|| UnknownIsa::Name(text.to_owned()))
    }
}
