//! Which kernels of the files translate at all.
mod common;
use common::Program;

#[test]
fn all_translate() {
    for file in ["basics", "basics-debug", "shared", "shared-sm_90", "grids", "maths"] {
        let program = Program::load(file);
        for kernel in program.module.kernels() {
            let block = match kernel { "matmul" | "transpose" => [16, 16, 1], _ => [256, 1, 1] };
            match program.translate(kernel, block, 1024) {
                Ok(t) => println!("{file} {kernel}: {} bytes of text", vm_ir::text::print(&t.module).len()),
                Err(e) => println!("{file} {kernel}: {e}"),
            }
        }
    }
}
