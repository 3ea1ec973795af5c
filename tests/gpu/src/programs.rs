//! The programs of the conformance suite, in the IR.
#![allow(unsafe_code)]

use anyhow::Context;
use vm_accel::Artifact;
use vm_accel::programs::Program;
use vm_ir::{Trust, ValidModule, text, validate};

use crate::gpu::{Gpu, named};

/// The number of the block, x fastest, and how many there are.
const BLOCKS: &str = "
  %bx32 = block_id.x : i32
  %by32 = block_id.y : i32
  %bz32 = block_id.z : i32
  %gx32 = grid_dim.x : i32
  %gy32 = grid_dim.y : i32
  %gz32 = grid_dim.z : i32
  %bx = sext %bx32 : i64
  %by = sext %by32 : i64
  %bz = sext %bz32 : i64
  %gx = sext %gx32 : i64
  %gy = sext %gy32 : i64
  %gz = sext %gz32 : i64
  %layer = mul %gy, %bz : i64
  %row_number = add %by, %layer : i64
  %before = mul %gx, %row_number : i64
  %block = add %bx, %before : i64
  %area = mul %gx, %gy : i64
  %blocks = mul %area, %gz : i64
  %t32 = thread_id.x : i32
  %t = sext %t32 : i64
";

/// From the work-item's first element to the step to its next, in blocks of 256.
const LINEAR: &str = "
  %width = const 256 : i64
  %start = mul %block, %width : i64
  %first = add %start, %t : i64
  %step = mul %blocks, %width : i64
";

fn text_of(program: Program) -> String {
    let (parameters, block, body) = match program {
        Program::Add | Program::Broken => (
            "@input: view<i32, [?], read>, @output: view<i32, [?], write>, %addend: i32".to_owned(),
            "256",
            format!(
                "{LINEAR}
  %n = extent @input, 0 : i64
  %m = extent @output, 0 : i64
  %end = min.s %n, %m : i64
  for %i: i64 = %first to %end step %step {{
    %value = load @input[%i] : i32
    %sum = add %value, %addend : i32
    store @output[%i], %sum
  }}"
            ),
        ),
        Program::Bump => (
            "@data: view<i32, [?], readwrite>, %by_how_much: i32".into(),
            "256",
            format!(
                "{LINEAR}
  %end = extent @data, 0 : i64
  for %i: i64 = %first to %end step %step {{
    %value = load @data[%i] : i32
    %sum = add %value, %by_how_much : i32
    store @data[%i], %sum
  }}"
            ),
        ),
        Program::Copy2 => copy(2),
        Program::Copy3 => copy(3),
        Program::Copy4 => copy(4),
        Program::Scalars => (
            "@output: view<i64, [4], write>, %a: i8, %b: i16, %c: i32, %d: i64".into(),
            "1",
            "
  %i0 = const 0 : i32
  %i1 = const 1 : i32
  %i2 = const 2 : i32
  %i3 = const 3 : i32
  %wide_a = zext %a : i64
  %wide_b = zext %b : i64
  %wide_c = zext %c : i64
  %zero = const 0 : i64
  %mine = eq %block, %zero : bool
  if %mine {
    store @output[%i0], %wide_a
    store @output[%i1], %wide_b
    store @output[%i2], %wide_c
    store @output[%i3], %d
  }"
            .into(),
        ),
        Program::Reverse => (
            "@data: view<i32, [?*64], readwrite>".into(),
            "64",
            "
  %width = const 64 : i64
  %start = mul %bx, %width : i64
  %mine = add %start, %t : i64
  %value = load @data[%mine] : i32
  store @tile[%t32], %value
  barrier.block
  %last = const 63 : i32
  %other = sub %last, %t32 : i32
  %reversed = load @tile[%other] : i32
  store @data[%mine], %reversed"
                .into(),
        ),
        Program::Ids => (
            "@output: view<i32, [?, 16], write>".into(),
            "4, 2, 2",
            "
  %ty32 = thread_id.y : i32
  %tz32 = thread_id.z : i32
  %s4 = const 4 : i32
  %s8 = const 8 : i32
  %s12 = const 12 : i32
  %s16 = const 16 : i32
  %s20 = const 20 : i32
  %p1 = shl %by32, %s4 : i32
  %p2 = shl %bz32, %s8 : i32
  %p3 = shl %t32, %s12 : i32
  %p4 = shl %ty32, %s16 : i32
  %p5 = shl %tz32, %s20 : i32
  %o1 = or %bx32, %p1 : i32
  %o2 = or %o1, %p2 : i32
  %o3 = or %o2, %p3 : i32
  %o4 = or %o3, %p4 : i32
  %o5 = or %o4, %p5 : i32
  %item = local_index : i32
  store @output[%block, %item], %o5"
                .into(),
        ),
        Program::Spin => (
            "@output: view<i32, [1], write>, %turns: i64".into(),
            "32",
            "
  %zero = const 0 : i64
  %one = const 1 : i64
  %turned = while carry(%n: i64 = %zero) {
    %more = lt.u %n, %turns : bool
    yield %more
  } do {
    %next = add %n, %one : i64
    yield %next
  }
  %place = const 0 : i32
  %done = trunc %turned : i32
  %set = min.u %done, %place : i32
  %flag = const 1 : i32
  %value = or %set, %flag : i32
  store @output[%place], %value"
                .into(),
        ),
    };
    let shared = if program == Program::Reverse { "\n  shared @tile: i32[64]" } else { "" };
    let name = program.name();
    format!("vir 1\n\nkernel @{name}({parameters}) at 0x1000 block({block}) {{{shared}{BLOCKS}{body}\n}}\n")
}

/// The parameters, block and body of a copy of this many dimensions.
fn copy(rank: usize) -> (String, &'static str, String) {
    let dims = vec!["?"; rank].join(", ");
    let mut body = String::new();
    for dimension in 0..rank {
        body += &format!(
            "\n  %n{dimension} = extent @source, {dimension} : i64\n  %m{dimension} = extent @target, {dimension} : i64\
             \n  %end{dimension} = min.s %n{dimension}, %m{dimension} : i64"
        );
    }
    body += "\n  %one = const 1 : i64\n  %zero = const 0 : i64\n  %width = const 64 : i64";
    let indices: Vec<String> = (0..rank).map(|dimension| format!("%i{dimension}")).collect();
    let indices = indices.join(", ");
    for dimension in 0..rank {
        let (from, step) = match dimension {
            0 => ("%block", "%blocks"),
            last if last + 1 == rank => ("%t", "%width"),
            _ => ("%zero", "%one"),
        };
        body += &format!("\n  for %i{dimension}: i64 = {from} to %end{dimension} step {step} {{");
    }
    body += &format!("\n  %value = load @source[{indices}] : i32\n  store @target[{indices}], %value");
    body += &"\n  }".repeat(rank);
    (format!("@source: view<i32, [{dims}], read>, @target: view<i32, [{dims}], write>"), "64", body)
}

/// A program as a module. Only the one that is to be stopped is a guest's.
fn module(program: Program) -> anyhow::Result<ValidModule> {
    let trust = if program == Program::Spin { Trust::Guest } else { Trust::Trusted };
    let source = text_of(program);
    let module = text::parse(&source).with_context(|| source.clone())?;
    validate(module, trust).with_context(|| source)
}

/// A program, compiled.
pub(crate) fn artifact(program: Program, gpu: &Gpu) -> anyhow::Result<Artifact> {
    let kernels = gpu.compile(&module(program)?)?;
    let artifact = named(&kernels, program.name())?.artifact().clone();
    match program {
        Program::Broken => {
            let image = b".version 7.0\n.target sm_70\n.address_size 64\nnonsense\n".to_vec();
            // SAFETY: it can't be loaded.
            Ok(unsafe { Artifact::new(image, artifact.signature().clone()) }?)
        }
        _ => Ok(artifact),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_have_the_blocks_and_parameters_that_the_suite_wants() {
        let target = "ptx:sm_80".parse().unwrap();
        for program in Program::ALL {
            let module = module(program).unwrap_or_else(|error| panic!("{program:?}: {error:#}"));
            let compiled = vm_jit::compile(&module, &target).unwrap();
            let (entry, wanted) = (&compiled.entries[0], program.signature());
            assert_eq!(entry.block, wanted.block, "{program:?}");
            assert_eq!(entry.params.slots.len(), wanted.parameters.len(), "{program:?}");
            assert_eq!(entry.params.guard.is_some(), wanted.guard.is_some(), "{program:?}");
        }
    }
}
