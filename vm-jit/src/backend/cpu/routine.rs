//! Routines of our own, in instructions that the code generator lacks. Each is put behind the code of every kernel that
//! calls it.

use super::isa::Isa;
use super::micro::Micro;
use super::wide::Function;
use super::writer::Writer;
use super::{chunks, wide};
use cranelift_codegen::binemit::Reloc;
use cranelift_codegen::ir::function::FunctionParameters;
use cranelift_codegen::ir::{
    AbiParam, ExtFuncData, ExternalName, FuncRef, Signature, UserExternalName, types,
};
use cranelift_codegen::isa::CallConv;
use cranelift_codegen::{Final, FinalizedRelocTarget, MachBufferFinalized};
use std::collections::BTreeMap;

/// A routine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routine {
    /// A function of each of sixteen floats.
    Wide(Function),
    /// A row that is copied in chunks.
    Chunks,
    /// A strip of a product.
    Micro(Micro),
}

impl Routine {
    /// The number by which the code generator knows it.
    fn number(self) -> u32 {
        match self {
            Routine::Wide(Function::Exp) => 0,
            Routine::Chunks => 1,
            Routine::Wide(Function::Exp2) => 2,
            Routine::Wide(Function::Tanh) => 3,
            Routine::Wide(Function::Erf) => 1 << 10,
            Routine::Wide(Function::ToBf16) => (1 << 10) + 1,
            Routine::Wide(Function::ToF16) => (1 << 10) + 2,
            Routine::Wide(Function::FromF16) => (1 << 10) + 3,
            Routine::Micro(Micro { rows, turned, adds, narrow }) => {
                u32::from(narrow) << 6 | u32::from(rows) << 2 | u32::from(turned) << 1 | u32::from(adds)
            }
        }
    }

    fn of(number: u32) -> Routine {
        match number {
            0 => Routine::Wide(Function::Exp),
            1 => Routine::Chunks,
            2 => Routine::Wide(Function::Exp2),
            3 => Routine::Wide(Function::Tanh),
            1024 => Routine::Wide(Function::Erf),
            1025 => Routine::Wide(Function::ToBf16),
            1026 => Routine::Wide(Function::ToF16),
            1027 => Routine::Wide(Function::FromF16),
            _ => Routine::Micro(Micro {
                rows: (number >> 2 & 0xf) as u8,
                narrow: number & 64 != 0,
                turned: number & 2 != 0,
                adds: number & 1 != 0,
            }),
        }
    }

    fn signature(self) -> Signature {
        match self {
            Routine::Wide(_) => {
                // It changes no register that the code generator knows of.
                let mut signature = Signature::new(CallConv::PreserveAll);
                signature.params.extend([types::F32X4; wide::VECTORS].map(AbiParam::new));
                signature.params.push(AbiParam::new(types::I64));
                signature
            }
            Routine::Chunks | Routine::Micro(_) => {
                let count = if self == Routine::Chunks { 5 } else { 7 };
                let mut signature = Signature::new(CallConv::SystemV);
                signature.params.extend(vec![AbiParam::new(types::I64); count]);
                signature
            }
        }
    }

    fn code(self, isa: Isa) -> Result<Vec<u8>, String> {
        let code = match self {
            Routine::Wide(function) => wide::code(function),
            Routine::Chunks => chunks::code(isa),
            Routine::Micro(micro) => micro.code(isa),
        };
        code.map_err(|error| error.to_string())
    }
}

impl Writer<'_, '_> {
    /// What a call of a routine names.
    pub(super) fn routine(&mut self, routine: Routine) -> FuncRef {
        let number = routine.number();
        if let Some(known) = self.routines.get(&number) {
            return *known;
        }
        let name = self.b.func.declare_imported_user_function(UserExternalName::new(0, number));
        let signature = self.b.import_signature(routine.signature());
        let name = ExternalName::user(name);
        let known =
            self.b.import_function(ExtFuncData { name, signature, colocated: true, patchable: false });
        self.routines.insert(number, known);
        known
    }
}

/// The code of a kernel, with the routines behind it that it calls.
///
/// # Errors
/// It calls anything else, or what is too far away.
pub(super) fn link(
    compiled: &MachBufferFinalized<Final>,
    function: &FunctionParameters,
    isa: Isa,
) -> Result<Vec<u8>, String> {
    let mut code = compiled.data().to_vec();
    let mut places = BTreeMap::new();
    for reloc in compiled.relocs() {
        let number = match (reloc.kind, &reloc.target) {
            (Reloc::X86CallPCRel4, FinalizedRelocTarget::ExternalName(ExternalName::User(name))) => {
                function.user_named_funcs().get(*name).map(|name| name.index)
            }
            _ => None,
        };
        let Some(number) = number else {
            return Err("the code would call a function that is not there".into());
        };
        let place = match places.get(&number) {
            Some(place) => *place,
            None => {
                code.resize(code.len().next_multiple_of(64), 0xcc);
                let place = code.len() as i64;
                code.extend(Routine::of(number).code(isa)?);
                places.insert(number, place);
                place
            }
        };
        let from = reloc.offset as usize;
        let by = place + reloc.addend - from as i64;
        let (Ok(by), Some(place)) = (i32::try_from(by), code.get_mut(from..from + 4)) else {
            return Err("a call is too far from what it calls".into());
        };
        place.copy_from_slice(&by.to_le_bytes());
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_tell_them_apart() {
        use Function::{Erf, Exp, Exp2, FromF16, Tanh, ToBf16, ToF16};
        let functions = [Exp, Exp2, Tanh, Erf, ToBf16, ToF16, FromF16];
        let mut all: Vec<_> = functions.into_iter().map(Routine::Wide).chain([Routine::Chunks]).collect();
        for rows in 1..=12 {
            for flags in 0..8 {
                let [turned, adds, narrow] = [1, 2, 4].map(|flag| flags & flag != 0);
                all.push(Routine::Micro(Micro { rows, turned, adds, narrow }));
            }
        }
        for routine in all {
            assert_eq!(Routine::of(routine.number()), routine);
        }
    }
}
