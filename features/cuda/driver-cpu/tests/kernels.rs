//! Kernels of PTX by the driver's API: what nvcc made, with and without faults in it, on the host's processor.

#![allow(unsafe_code)]

#[path = "../../../testing/cuda-fake/tests/common/mod.rs"]
mod common;

use common::*;
use std::io::Write;
use std::path::Path;
use std::process::Command;

const INVALID_IMAGE: Code = 200;
const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NO_BINARY: Code = 209;
const NOT_SUPPORTED: Code = 801;
const ASSERT_FAILED: Code = 710;
const LAUNCH_FAILED: Code = 719;
const CAPTURE_INVALIDATED: Code = 901;
const INVALID_PTX: Code = 218;
const TIMEOUT: Code = 702;
const TOO_LARGE: Code = 720;
const UNKNOWN: Code = 999;

/// What nvcc made of the kernels of vm-ptx's tests.
fn file(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ptx/tests/kernels").join(name);
    let mut bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    bytes.push(0);
    bytes
}

/// A module of a text that is not of nvcc.
fn module(driver: &Driver, body: &str) -> Result<u64, Code> {
    let mut text = format!(".version 8.0\n.target sm_80\n.address_size 64\n{body}\0").into_bytes();
    let mut module = 0u64;
    match driver.call("cuModuleLoadData", &[at(&mut module), at(text.as_mut_slice())]) {
        0 => Ok(module),
        code => Err(code),
    }
}

fn function(driver: &Driver, module: u64, name: &str) -> u64 {
    let mut name = [name.as_bytes(), b"\0"].concat();
    driver.get("cuModuleGetFunction", &[module, at(name.as_mut_slice())])
}

fn load(driver: &Driver, name: &str) -> u64 {
    driver.get("cuModuleLoadData", &[at(file(name).as_mut_slice())])
}

/// Device memory with these bytes.
fn put(driver: &Driver, bytes: &[u8]) -> u64 {
    let memory = driver.get("cuMemAlloc_v2", &[bytes.len() as u64]);
    driver.ok("cuMemcpyHtoD_v2", &[memory, at(bytes.to_vec().as_mut_slice()), bytes.len() as u64]);
    memory
}

fn put_floats(driver: &Driver, floats: &[f32]) -> u64 {
    put(driver, &floats.iter().flat_map(|float| float.to_le_bytes()).collect::<Vec<_>>())
}

fn floats(driver: &Driver, from: u64, count: usize) -> Vec<f32> {
    driver.words(from, count).into_iter().map(f32::from_bits).collect()
}

/// Launches a grid of a line of blocks, and waits.
fn launch(
    driver: &Driver,
    function: u64,
    [grid, block]: [u64; 2],
    shared: u64,
    mut parameters: Vec<u64>,
) -> Code {
    let mut pointers: Vec<u64> = parameters.iter_mut().map(at).collect();
    let pointers = at(pointers.as_mut_slice());
    match driver.call("cuLaunchKernel", &[function, grid, 1, 1, block, 1, 1, shared, 0, pointers]) {
        0 => driver.synchronize(),
        code => code,
    }
}

#[test]
fn vectors_are_added() {
    alike("vectors_are_added", &[], |driver| {
        driver.start(0);
        let (a, b): (Vec<f32>, Vec<f32>) = (0..1000).map(|i| (i as f32, 0.5 * i as f32)).unzip();
        let expect: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let (a, b) = (put_floats(driver, &a), put_floats(driver, &b));
        for name in ["basics.ptx", "basics-debug.ptx"] {
            let add = function(driver, load(driver, name), "vector_add");
            let sum = put_floats(driver, &[0.0; 1000]);
            assert_eq!(launch(driver, add, [4, 256], 0, vec![a, b, sum, 1000]), 0);
            assert_eq!(floats(driver, sum, 1000), expect, "{name}");
        }
    });
}

#[test]
fn blocks_share_memory() {
    alike("blocks_share_memory", &[], |driver| {
        driver.start(0);
        let values: Vec<f32> = (0..5000u16).map(|i| f32::from(i % 17)).collect();
        let sum: f32 = values.iter().sum();
        let module = load(driver, "shared.ptx");
        let (values, parts, one) =
            (put_floats(driver, &values), put_floats(driver, &[0.0; 4]), put_floats(driver, &[0.0]));
        assert_eq!(
            launch(driver, function(driver, module, "reduce"), [4, 256], 0, vec![values, parts, 5000]),
            0
        );
        assert_eq!(floats(driver, parts, 4).iter().sum::<f32>(), sum);
        let warps = function(driver, module, "reduce_warps");
        assert_eq!(launch(driver, warps, [20, 256], 32, vec![values, one, 5000]), 0);
        assert_eq!(floats(driver, one, 1), [sum]);

        let mut size = 0u64;
        driver.ok("cuFuncGetAttribute", &[at(&mut size), 1, function(driver, module, "matmul")]);
        assert_eq!(size, 2048, "bytes of shared memory");

        let n = 20usize;
        let a: Vec<f32> = (0..n * n).map(|i| (i % 7) as f32).collect();
        let product = |at: usize| (0..n).map(|k| a[at / n * n + k] * a[k * n + at % n]).sum::<f32>();
        let (at_a, c) = (put_floats(driver, &a), put_floats(driver, &vec![0.0; n * n]));
        let mut parameters = [at_a, at_a, c, n as u64];
        let mut pointers = parameters.each_mut().map(at);
        let matmul = function(driver, module, "matmul");
        driver.ok("cuLaunchKernel", &[matmul, 2, 2, 1, 16, 16, 1, 0, 0, at(&mut pointers)]);
        assert_eq!(driver.synchronize(), 0);
        assert_eq!(floats(driver, c, n * n), (0..n * n).map(product).collect::<Vec<_>>());
    });
}

#[test]
fn images_of_all_kinds_are_loaded() {
    alike("images_of_all_kinds_are_loaded", &[], |driver| {
        driver.start(0);
        for name in ["small-none.fatbin", "small-size.fatbin", "small-speed.fatbin"] {
            let mut image = file(name);
            // The wrapper that nvcc puts around it in programs.
            let mut wrapper = [0x1_4662_43b1u64, at(image.as_mut_slice()), 0];
            let modules = [
                driver.get("cuModuleLoadFatBinary", &[at(image.as_mut_slice())]),
                driver.get("cuModuleLoadData", &[at(&mut wrapper)]),
            ];
            let library = driver.get("cuLibraryLoadData", &[at(&mut wrapper), 0, 0, 0, 0, 0, 0]);
            let mut symbol = *b"vector_add\0";
            let kernel = driver.get("cuLibraryGetKernel", &[library, at(&mut symbol)]);
            let functions = modules.map(|module| function(driver, module, "vector_add"));
            let of_kernel = driver.get("cuKernelGetFunction", &[kernel]);
            for add in [functions[0], functions[1], kernel, of_kernel] {
                let (a, sum) = (put_floats(driver, &[1.0, 2.0]), put_floats(driver, &[0.0; 2]));
                assert_eq!(launch(driver, add, [1, 32], 0, vec![a, a, sum, 2]), 0);
                assert_eq!(floats(driver, sum, 2), [2.0, 4.0], "{name}");
            }
            driver.ok("cuLibraryUnload", &[library]);
            assert_eq!(driver.call("cuLaunchKernel", &[kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0]), INVALID_HANDLE);
        }
    });
}

/// Options of a link or a load, and where its logs go.
struct Jit {
    info: [u8; 4096],
    error: [u8; 4096],
    options: [i32; 6],
    values: [u64; 6],
}

impl Jit {
    /// With logs and a limit of registers.
    fn new(max_registers: u64) -> Box<Jit> {
        // The logs with their sizes, a verbose log, and the limit.
        let (options, values) = ([3, 4, 5, 6, 12, 0], [0, 4096, 0, 4096, 1, max_registers]);
        let mut jit = Box::new(Jit { info: [0; 4096], error: [0; 4096], options, values });
        (jit.values[0], jit.values[2]) = (at(&mut jit.info), at(&mut jit.error));
        jit
    }

    fn link(&mut self, driver: &Driver) -> u64 {
        let mut link = 0u64;
        let places = [at(&mut self.options), at(&mut self.values), at(&mut link)];
        driver.ok("cuLinkCreate_v2", &[&[6], places.as_slice()].concat());
        // Programs free it.
        self.values = [0; 6];
        link
    }

    fn logs(&self) -> [String; 2] {
        [self.info, self.error].map(|log| String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
    }
}

const LINKED_PTX: u64 = 1;
const LINKED_FAT_BINARY: u64 = 2;
const LINKED_OBJECT: u64 = 3;
const LINKED_LIBRARY: u64 = 4;
const LINKED_NVVM: u64 = 5;

fn add(driver: &Driver, link: u64, kind: u64, data: &[u8], name: &str) -> Code {
    let (mut data, mut name) = (data.to_vec(), [name.as_bytes(), b"\0"].concat());
    let (len, data, name) = (data.len() as u64, at(data.as_mut_slice()), at(name.as_mut_slice()));
    driver.call("cuLinkAddData_v2", &[link, kind, data, len, name, 0, 0, 0])
}

fn ptx(body: &str) -> Vec<u8> {
    format!(".version 8.0\n.target sm_80\n.address_size 64\n{body}\0").into_bytes()
}

/// Completes a link, loads the result and destroys the link.
fn load_linked(driver: &Driver, link: u64) -> u64 {
    let (mut linked, mut size) = (0u64, 0u64);
    driver.ok("cuLinkComplete", &[link, at(&mut linked), at(&mut size)]);
    let module = driver.get("cuModuleLoadData", &[linked]);
    driver.ok("cuLinkDestroy", &[link]);
    module
}

fn attribute(driver: &Driver, function: u64, attribute: u64) -> i32 {
    let mut value = 0i32;
    driver.ok("cuFuncGetAttribute", &[at(&mut value), attribute, function]);
    value
}

/// A kernel that stores what a function of another module returns for its argument.
const CALLS: &str = ".extern .func (.param .b32 r) twice(.param .b32 x);\n\
    .visible .entry k(.param .u64 out, .param .u32 x) {\n.reg .b32 %r<3>; .reg .b64 %d<2>;\n\
    ld.param.u64 %d1, [out]; ld.param.u32 %r1, [x];\n\
    { .param .b32 a; st.param.b32 [a], %r1; .param .b32 got; call.uni (got), twice, (a); ld.param.b32 %r2, [got]; }\n\
    st.global.u32 [%d1], %r2; ret;\n}\n";

/// That function, with a factor in a variable of its module.
const CALLED: &str = ".const .align 4 .u32 factor = 2;\n\
    .visible .func (.param .b32 r) twice(.param .b32 x) {\n.reg .b32 %r<4>;\n\
    ld.param.b32 %r1, [x]; ld.const.u32 %r2, [factor]; mul.lo.u32 %r3, %r1, %r2; st.param.b32 [r], %r3; ret;\n}\n";

#[test]
fn modules_are_linked() {
    alike("modules_are_linked", &[], |driver| {
        driver.start(0);
        let mut jit = Jit::new(40);
        let link = jit.link(driver);
        let image = file("small-none.fatbin");
        assert_eq!(add(driver, link, LINKED_PTX, &ptx(CALLS), "calls.ptx"), 0);
        assert_eq!(add(driver, link, LINKED_FAT_BINARY, &image, "small.fatbin"), 0);
        assert_eq!(add(driver, link, LINKED_PTX, &ptx(CALLED), "called.ptx"), 0);
        let module = load_linked(driver, link);
        let out = put(driver, &[0; 4]);
        let kernel = function(driver, module, "k");
        assert_eq!(launch(driver, kernel, [1, 1], 0, vec![out, 21]), 0);
        assert_eq!(driver.words(out, 1), [42]);
        assert!((1..=40).contains(&attribute(driver, kernel, 4)));
        let (a, sum) = (put_floats(driver, &[1.0, 2.0]), put_floats(driver, &[0.0; 2]));
        let vector_add = function(driver, module, "vector_add");
        assert_eq!(launch(driver, vector_add, [1, 32], 0, vec![a, a, sum, 2]), 0);
        assert_eq!(floats(driver, sum, 2), [2.0, 4.0]);
        let [info, error] = jit.logs();
        assert!(info.contains("vector_add") && error.is_empty(), "{info}\n{error}");
    });
}

#[test]
fn a_link_that_fails_says_why() {
    alike("a_link_that_fails_says_why", &[], |driver| {
        driver.start(0);
        let fails = |inputs: &[(&str, &str)], message: &str| {
            let mut jit = Jit::new(0);
            let link = jit.link(driver);
            for (name, text) in inputs {
                assert_eq!(add(driver, link, LINKED_PTX, &ptx(text), name), 0);
            }
            let (mut linked, mut size) = (0u64, 0u64);
            assert_eq!(driver.call("cuLinkComplete", &[link, at(&mut linked), at(&mut size)]), UNKNOWN);
            let error = &jit.logs()[1];
            assert!(error.contains(message), "{error}");
            driver.ok("cuLinkDestroy", &[link]);
        };
        fails(&[("calls.ptx", CALLS)], "Undefined reference to 'twice' in 'calls.ptx'");
        let twice = [("calls.ptx", CALLS), ("a.ptx", CALLED), ("b.ptx", CALLED)];
        fails(&twice, "Multiple definition of 'twice' in 'b.ptx', first defined in 'a.ptx'");

        let mut jit = Jit::new(0);
        let link = jit.link(driver);
        let bad = ptx(".visible .entry k() {\nadd.u32 %r1, ;\n}\n");
        assert_eq!(add(driver, link, LINKED_PTX, &bad, "bad.ptx"), INVALID_PTX);
        assert!(jit.logs()[1].contains("line 5"), "{}", jit.logs()[1]);
        // The link goes on without it.
        assert_eq!(add(driver, link, LINKED_PTX, &ptx(".visible .entry k() {\nret;\n}\n"), "k.ptx"), 0);
        function(driver, load_linked(driver, link), "k");
    });
}

#[test]
fn a_link_refuses_what_has_no_ptx() {
    alone("a_link_refuses_what_has_no_ptx", &[], |driver| {
        driver.start(0);
        let mut jit = Jit::new(0);
        let link = jit.link(driver);
        let image = file("small-none.fatbin");
        assert_eq!(add(driver, link, 0, &image, "machine.cubin"), NO_BINARY);
        assert_eq!(add(driver, link, LINKED_NVVM, &image, "lto.bc"), NO_BINARY);
        assert_eq!(add(driver, link, 6, &image, "what"), INVALID_VALUE);
        assert_eq!(add(driver, link, LINKED_OBJECT, &image, "a.o"), INVALID_IMAGE);
        let [_, error] = jit.logs();
        for name in ["machine.cubin", "lto.bc: NVVM IR and LTO IR", "a.o: no object file"] {
            assert!(error.contains(name), "{error}");
        }
        let (mut linked, mut size) = (0u64, 0u64);
        driver.check(&[
            ("cuLinkComplete", &[link, at(&mut linked), at(&mut size)], INVALID_VALUE),
            ("cuLinkDestroy", &[link], 0),
            ("cuLinkDestroy", &[link], INVALID_HANDLE),
        ]);
        assert_eq!(add(driver, link, LINKED_PTX, &ptx(CALLED), "late.ptx"), INVALID_HANDLE);
    });
}

/// An object file for the host with a section of these bytes.
fn object(section: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 64];
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    let table = (64 + section.len()) as u64;
    file[40..48].copy_from_slice(&table.to_le_bytes());
    (file[58], file[60]) = (64, 2);
    file.extend(section);
    let head = file.len() + 64;
    file.resize(head + 64, 0);
    // SHT_PROGBITS, the offset and the size.
    file[head + 4] = 1;
    file[head + 24..head + 32].copy_from_slice(&64u64.to_le_bytes());
    file[head + 32..head + 40].copy_from_slice(&(section.len() as u64).to_le_bytes());
    file
}

/// A fat binary of PTX that is not packed.
fn fat_binary(text: &[u8]) -> Vec<u8> {
    let mut entry = vec![0u8; 64];
    (entry[0], entry[2], entry[4], entry[28]) = (1, 1, 64, 80);
    entry[8..16].copy_from_slice(&(text.len().next_multiple_of(8) as u64).to_le_bytes());
    entry.extend(text);
    entry.resize(entry.len().next_multiple_of(8), 0);
    [&0xba55_ed50u32.to_le_bytes()[..], &[1, 0, 16, 0], &(entry.len() as u64).to_le_bytes(), &entry].concat()
}

fn library(members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut file = b"!<arch>\n".to_vec();
    for (name, member) in members {
        file.extend(format!("{:<48}{:<10}`\n", format!("{name}/"), member.len()).bytes());
        file.extend(member);
        file.resize(file.len().next_multiple_of(2), b'\n');
    }
    file
}

#[test]
fn objects_and_libraries_are_linked() {
    alone("objects_and_libraries_are_linked", &[], |driver| {
        driver.start(0);
        let called = object(&fat_binary(&ptx(CALLED)));
        // Not needed, and it would define the kernel again.
        let kernel = object(&fat_binary(&ptx(".visible .entry k() {\nret;\n}\n")));
        let archive = library(&[("", b"symbols".to_vec()), ("k.o", kernel), ("called.o", called.clone())]);
        for (kind, data) in [(LINKED_OBJECT, &called), (LINKED_LIBRARY, &archive)] {
            let mut jit = Jit::new(0);
            let link = jit.link(driver);
            assert_eq!(add(driver, link, LINKED_PTX, &ptx(CALLS), "calls.ptx"), 0);
            assert_eq!(add(driver, link, kind, data, "called"), 0);
            let out = put(driver, &[0; 4]);
            let kernel = function(driver, load_linked(driver, link), "k");
            assert_eq!(launch(driver, kernel, [1, 1], 0, vec![out, 4]), 0);
            assert_eq!(driver.words(out, 1), [8]);
        }
        // Files that end early are errors of their calls.
        let mut jit = Jit::new(0);
        let link = jit.link(driver);
        for len in (0..archive.len()).step_by(61) {
            let code = add(driver, link, LINKED_LIBRARY, &archive[..len], "cut");
            assert!([0, INVALID_IMAGE].contains(&code), "{len}: {code}");
        }
    });
}

#[test]
fn functions_have_attributes() {
    alike("functions_have_attributes", &[], |driver| {
        driver.start(0);
        let adds: String = (1..=60).map(|at| format!("add.f64 %sum, %sum, %f{at};\n")).collect();
        let loads: String = (1..=60).map(|at| format!("ld.volatile.global.f64 %f{at}, [%d1];\n")).collect();
        let body = |bounds: &str| {
            format!(
                ".const .align 8 .b8 table[200];\n.const .align 4 .u32 one = 1;\n\
                 .visible .entry k(.param .u64 out) {bounds} {{\n.reg .b64 %d<2>; .reg .f64 %f<99>, %sum;\n\
                 .shared .align 4 .b8 block[400]; .local .align 8 .b8 thread[48];\n\
                 ld.param.u64 %d1, [out];\n{loads}mov.f64 %sum, 0d0000000000000000;\n{adds}st.global.f64 [%d1], %sum;\n\
                 st.shared.u32 [block], 1; st.local.u32 [thread], 1; ret;\n}}\n.visible .entry small() {{\nret;\n}}\n"
            )
        };
        let module = self::module(driver, &body(".maxntid 128, 1, 1")).unwrap();
        let kernel = function(driver, module, "k");
        assert_eq!(attribute(driver, kernel, 0), 128, "threads of a block");
        assert_eq!(attribute(driver, kernel, 1), 400, "bytes of shared memory");
        assert_eq!(attribute(driver, kernel, 2), 204, "bytes of constants");
        assert!(attribute(driver, kernel, 3) >= 48, "bytes of local memory");
        // Sixty numbers of 64 bits are live at once.
        assert!((120..=255).contains(&attribute(driver, kernel, 4)));
        assert!((1..40).contains(&attribute(driver, function(driver, module, "small"), 4)));

        let module = self::module(driver, &body(".maxnreg 64")).unwrap();
        assert!(attribute(driver, function(driver, module, "k"), 4) <= 64);
        let (mut module, mut text, mut jit) = (0u64, ptx(&body("")), Jit::new(72));
        let options = [at(&mut jit.options), at(&mut jit.values)];
        driver.ok(
            "cuModuleLoadDataEx",
            &[&[at(&mut module), at(text.as_mut_slice()), 6], options.as_slice()].concat(),
        );
        assert!(attribute(driver, function(driver, module, "k"), 4) <= 72);
    });
}

#[test]
fn modules_have_variables() {
    alike("modules_have_variables", &[], |driver| {
        driver.start(0);
        let body = ".global .align 4 .u32 count = 5;\n.const .align 4 .b32 table[3] = {7, 8, 9};\n\
            .global .align 8 .u64 to = generic(count);\n\
            .visible .entry bump(.param .u64 out) {\n.reg .b64 %x<3>; .reg .b32 %r<4>;\n\
            ld.param.u64 %x1, [out]; ld.global.u64 %x2, [to]; ld.u32 %r1, [%x2]; add.u32 %r1, %r1, 1; st.u32 [%x2], %r1;\n\
            ld.const.u32 %r2, [table+4]; add.u32 %r2, %r2, %r1; st.global.u32 [%x1], %r2; ret;\n}\n";
        let before = driver.used();
        let module = module(driver, body).unwrap();
        let out = put(driver, &[0; 4]);
        let bump = function(driver, module, "bump");
        for expect in [14, 15] {
            assert_eq!(launch(driver, bump, [1, 1], 0, vec![out]), 0);
            assert_eq!(driver.words(out, 1), [expect]);
        }
        let (mut address, mut size) = (0u64, 0u64);
        let mut global = |name: &[u8]| {
            let mut name = name.to_vec();
            let arguments = [at(&mut address), at(&mut size), module, at(name.as_mut_slice())];
            let code = driver.call("cuModuleGetGlobal_v2", &arguments);
            (code, address, size)
        };
        assert_eq!(global(b"none\0").0, NOT_FOUND);
        let (code, address, size) = global(b"table\0");
        assert_eq!((code, size, driver.words(address, 3)), (0, 12, vec![7, 8, 9]));
        let (_, count, size) = global(b"count\0");
        assert_eq!((size, driver.words(count, 1)), (4, vec![7]));
        driver.ok("cuMemsetD32_v2", &[count, 1, 1]);
        assert_eq!(launch(driver, bump, [1, 1], 0, vec![out]), 0);
        assert_eq!(driver.words(out, 1), [10]);
        driver.ok("cuMemFree_v2", &[out]);
        driver.ok("cuModuleUnload", &[module]);
        driver.uses(before);
    });
}

#[test]
fn parameters_come_in_both_ways() {
    alike("parameters_come_in_both_ways", &[], |driver| {
        driver.start(0);
        let body = ".visible .entry put(.param .u8 a, .param .u64 to, .param .align 4 .b8 pair[12], .param .f64 d) {\n\
            .reg .b64 %x<4>; .reg .b32 %r<4>; .reg .f64 %d<2>;\n\
            ld.param.u64 %x1, [to]; ld.param.u8 %r1, [a]; ld.param.u32 %r2, [pair+8]; ld.param.f64 %d1, [d];\n\
            cvt.rzi.u32.f64 %r3, %d1; st.global.u32 [%x1], %r1; st.global.u32 [%x1+4], %r2; st.global.u32 [%x1+8], %r3; ret;\n}\n";
        let put_all = function(driver, module(driver, body).unwrap(), "put");
        let to = put(driver, &[0; 12]);
        let places = [(0, 1), (8, 8), (16, 12), (32, 8)];
        for (index, place) in places.into_iter().enumerate() {
            let (mut offset, mut size) = (0u64, 0u64);
            driver.ok("cuFuncGetParamInfo", &[put_all, index as u64, at(&mut offset), at(&mut size)]);
            assert_eq!((offset, size), place);
        }
        let mut block = [0u8; 40];
        block[0] = 200;
        block[8..16].copy_from_slice(&to.to_le_bytes());
        block[24..28].copy_from_slice(&77u32.to_le_bytes());
        block[32..].copy_from_slice(&1234.5f64.to_le_bytes());
        let mut size = block.len() as u64;
        let mut extra = [1, at(&mut block), 2, at(&mut size), 0];
        driver.ok("cuLaunchKernel", &[put_all, 1, 1, 1, 1, 1, 1, 0, 0, 0, at(&mut extra)]);
        assert_eq!(driver.synchronize(), 0);
        assert_eq!(driver.words(to, 3), [200, 77, 1234]);
        driver.ok("cuMemsetD8_v2", &[to, 0, 12]);
        let mut pointers = places.map(|(offset, _)| at(&mut block[offset as usize..]));
        driver.ok("cuLaunchKernel", &[put_all, 1, 1, 1, 1, 1, 1, 0, 0, at(&mut pointers), 0]);
        assert_eq!(driver.synchronize(), 0);
        assert_eq!(driver.words(to, 3), [200, 77, 1234]);
    });
}

#[test]
fn parameters_have_up_to_32764_bytes() {
    alike("parameters_have_up_to_32764_bytes", &[], |driver| {
        driver.start(0);
        let out = put(driver, &[0; 4 * 64]);
        for words in [1000u32, 1022, 2000, 8189, 8190] {
            let bytes = 4 * words;
            let body = format!(
                ".visible .entry pick(.param .u64 to, .param .align 4 .b8 table[{bytes}]) {{\n\
                .reg .b64 %x<6>; .reg .b32 %r<6>;\n\
                ld.param.u64 %x1, [to]; mov.u32 %r1, %tid.x; mul.lo.u32 %r2, %r1, 61; rem.u32 %r2, %r2, {words}; mov.b64 %x2, table;\n\
                mul.wide.u32 %x3, %r2, 4; add.s64 %x4, %x2, %x3; ld.param.u32 %r3, [%x4]; ld.param.u32 %r4, [table+{}]; add.u32 %r3, %r3, %r4;\n\
                mul.wide.u32 %x3, %r1, 4; add.s64 %x5, %x1, %x3; st.global.u32 [%x5], %r3; ret;\n}}\n",
                bytes - 4
            );
            let loaded = module(driver, &body).unwrap();
            let mut function = 0u64;
            let mut name = *b"pick\0";
            let code = driver.call("cuModuleGetFunction", &[at(&mut function), loaded, at(&mut name)]);
            if words == 8190 {
                assert_eq!(code, NOT_FOUND, "more than the limit");
                break;
            }
            assert_eq!(code, 0, "{bytes}");
            let mut table: Vec<u32> = (0..words).map(|at| at * 5).collect();
            let mut to = out;
            let mut pointers = [at(&mut to), at(table.as_mut_slice())];
            driver.ok("cuLaunchKernel", &[function, 1, 1, 1, 64, 1, 1, 0, 0, at(&mut pointers)]);
            assert_eq!(driver.synchronize(), 0);
            let wanted: Vec<u32> = (0..64).map(|at| at * 61 % words * 5 + (words - 1) * 5).collect();
            assert_eq!(driver.words(out, 64), wanted, "{bytes}");
        }
    });
}

#[test]
fn a_launch_beyond_a_limit_is_an_invalid_value() {
    alike("a_launch_beyond_a_limit_is_an_invalid_value", &[], |driver| {
        driver.start(0);
        let body =
            ".visible .entry any() {\nret;\n}\n.visible .entry bound() .maxntid 128, 1, 1 {\nret;\n}\n";
        let module = module(driver, body).unwrap();
        let (any, bound) = (function(driver, module, "any"), function(driver, module, "bound"));
        let attribute = |function| {
            let mut most = 0u64;
            driver.ok("cuFuncGetAttribute", &[at(&mut most), 0, function]);
            most
        };
        assert_eq!((attribute(any), attribute(bound)), (1024, 128));
        for (function, [x, y, z], [grid_x, grid_y, grid_z], code) in [
            (any, [1024, 1, 1], [1, 1, 1], 0),
            (any, [2048, 1, 1], [1, 1, 1], INVALID_VALUE),
            (any, [32, 33, 1], [1, 1, 1], INVALID_VALUE),
            (any, [1, 1, 65], [1, 1, 1], INVALID_VALUE),
            (any, [0, 1, 1], [1, 1, 1], INVALID_VALUE),
            (any, [1, 1, 1], [0, 1, 1], INVALID_VALUE),
            (any, [1, 1, 1], [1, 65536, 1], INVALID_VALUE),
            (any, [1, 1, 1], [1, 1, 65536], INVALID_VALUE),
            (bound, [64, 2, 1], [1, 1, 1], 0),
            (bound, [129, 1, 1], [1, 1, 1], INVALID_VALUE),
        ] {
            let arguments = [function, grid_x, grid_y, grid_z, x, y, z, 0, 0, 0];
            assert_eq!(driver.call("cuLaunchKernel", &arguments), code, "{arguments:?}");
            assert_eq!(driver.synchronize(), 0);
        }
    });
}

#[test]
fn managed_variables_are_the_hosts_too() {
    alone("managed_variables_are_the_hosts_too", &[], |driver| {
        driver.ok("cuInit", &[0]);
        let mut text = b".version 8.0\n.target sm_75\n.address_size 64\n\
            .visible .global .align 4 .u32 plain = 3;\n\
            .visible .global .attribute(.managed) .align 4 .u32 counter = 40;\n\
            .visible .entry bump() {\n.reg .b32 %r<3>;\n\
            ld.global.u32 %r1, [counter]; add.u32 %r1, %r1, 2; st.global.u32 [counter], %r1; ret;\n}\n\0"
            .to_vec();
        let library = driver.get("cuLibraryLoadData", &[at(text.as_mut_slice()), 0, 0, 0, 0, 0, 0]);
        // Without a context.
        let (mut address, mut size) = (0u64, 0u64);
        let (mut counter, mut plain, mut bump) = (*b"counter\0", *b"plain\0", *b"bump\0");
        let mut none = 0u64;
        driver.check(&[
            ("cuLibraryGetManaged", &[at(&mut none), at(&mut none), library, at(&mut plain)], NOT_FOUND),
            ("cuLibraryGetManaged", &[at(&mut address), at(&mut size), library, at(&mut counter)], 0),
        ]);
        assert_eq!(size, 4);
        // SAFETY: the host accesses managed memory while nothing runs.
        let host =
            |address: u64| unsafe { &mut *std::ptr::with_exposed_provenance_mut::<u32>(address as usize) };
        assert_eq!(*host(address), 40);
        *host(address) += 1;
        driver.start(0);
        let kernel = driver.get("cuLibraryGetKernel", &[library, at(&mut bump)]);
        for expect in [43, 45] {
            assert_eq!(launch(driver, kernel, [1, 1], 0, vec![]), 0);
            assert_eq!(*host(address), expect);
        }
        let module = driver.get("cuLibraryGetModule", &[library]);
        let mut global = 0u64;
        driver.ok("cuModuleGetGlobal_v2", &[at(&mut global), at(&mut size), module, at(&mut counter)]);
        assert_eq!((global, size), (address, 4));
        let mut is_managed = 0u32;
        driver.ok("cuPointerGetAttribute", &[at(&mut is_managed), 8, address]);
        assert_eq!(is_managed, 1);
        driver.ok("cuLibraryUnload", &[library]);
    });
}

#[test]
fn images_that_cannot_run_are_refused_with_the_reason() {
    alone("images_that_cannot_run_are_refused_with_the_reason", &[], |driver| {
        driver.start(0);
        let mut log = [0u8; 200];
        let (mut options, mut values) = ([5i32, 6], [at(&mut log), 200]);
        let mut text =
            *b".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k() { add.u32 %r1, }\0";
        let mut module = 0u64;
        let arguments = [at(&mut module), at(&mut text), 2, at(&mut options), at(&mut values)];
        assert_eq!(driver.call("cuModuleLoadDataEx", &arguments), INVALID_PTX);
        let said = String::from_utf8_lossy(&log).into_owned();
        assert!(said.contains("line 4"), "{said}");
        let mut machine_code = *b"\x7fELF\x02\x01\x01\0";
        assert_eq!(driver.call("cuModuleLoadData", &[at(&mut module), at(&mut machine_code)]), NO_BINARY);
        assert_eq!(driver.call("cuModuleLoadData", &[at(&mut module), 0]), INVALID_VALUE);

        // An error of that call alone.
        let fine = function(driver, self::module(driver, ODD).unwrap(), "fine");
        assert_eq!(launch(driver, fine, [1, 1], 0, vec![]), 0);
        assert_eq!(launch(driver, fine, [1, 1], 1 << 20, vec![]), INVALID_VALUE, "so much shared memory");
        assert_eq!(launch(driver, fine, [1, 1], 0, vec![]), 0);
    });
}

#[test]
fn a_corrupt_image_is_an_error_of_its_call() {
    alone("a_corrupt_image_is_an_error_of_its_call", &[], |driver| {
        driver.start(0);
        let mut module = 0u64;
        let module = at(&mut module);
        let check = |image: u64, what: &str| {
            let mut wrapper = [0x1_4662_43b1u64, image, 0];
            for (call, image) in [
                ("cuModuleLoadData", image),
                ("cuModuleLoadDataEx", image),
                ("cuModuleLoadFatBinary", image),
                ("cuLibraryLoadData", image),
                ("cuModuleLoadData", at(&mut wrapper)),
            ] {
                let code = driver.call(call, &[module, image, 0, 0, 0, 0, 0, 0]);
                assert_eq!(code, INVALID_IMAGE, "{call}: {what}");
            }
        };
        let fine = file("small-none.fatbin");
        let len = fine.len() as u64 - 1;
        // Corrupts the size of the payload and the size of the header, which is 16.
        let headers = (0..16).map(|bit| (6, 1 << bit)).filter(|(_, header)| *header != 16);
        for (offset, value) in (0..64).map(|bit| (8, 1u64 << bit)).chain(headers) {
            let mut image = fine.clone();
            let size = if offset == 8 { 8 } else { 2 };
            image[offset..offset + size].copy_from_slice(&value.to_le_bytes()[..size]);
            check(at(image.as_mut_slice()), &format!("{value:#x} at {offset}"));
        }
        let sizes = [u64::MAX, u64::MAX - 16, i64::MAX as u64, 0xffff_ffff_ffff, len, len - 17];
        for size in sizes {
            let mut image = fine.clone();
            image[8..16].copy_from_slice(&size.to_le_bytes());
            check(at(image.as_mut_slice()), &format!("{size:#x}"));
        }
        // Images that memory ends in: in a header, in a fat binary, and in a text without its end.
        // The next page of the driver's addresses is inaccessible.
        let end = driver.get("cuMemHostAlloc", &[8192, 0]) + 8192;
        let text = b".version 8.0 .target sm_75 ".repeat(200);
        for (image, what) in [
            (&fine[..3], "a magic"),
            (&fine[..15], "a header"),
            (&fine[..2000], "a fat binary"),
            (&text[..4096], "a text"),
        ] {
            let mut image = image.to_vec();
            let (place, len) = (end - image.len() as u64, image.len() as u64);
            driver.ok("cuMemcpy", &[place, at(image.as_mut_slice()), len]);
            check(place, what);
        }
        check(end, "no memory");
        // Files and linked data have a length of their own.
        let mut short = fine.clone();
        short[8..16].copy_from_slice(&(len + 4096).to_le_bytes());
        let mut path = tempfile::NamedTempFile::new().unwrap();
        path.write_all(&short).unwrap();
        let mut name = [path.path().as_os_str().as_encoded_bytes(), b"\0"].concat();
        let name = at(name.as_mut_slice());
        let mut link = 0u64;
        driver.ok("cuLinkCreate_v2", &[0, 0, 0, at(&mut link)]);
        let (len, data) = (short.len() as u64, at(short.as_mut_slice()));
        driver.check(&[
            ("cuModuleLoad", &[module, name], INVALID_IMAGE),
            ("cuLibraryLoadFromFile", &[module, name, 0, 0, 0, 0, 0, 0], INVALID_IMAGE),
            ("cuLinkAddData_v2", &[link, 2, data, len, 0, 0, 0, 0], INVALID_IMAGE),
            ("cuLinkAddFile_v2", &[link, 2, name, 0, 0, 0], INVALID_IMAGE),
        ]);
        let mut fine = fine;
        driver.ok("cuModuleLoadData", &[module, at(fine.as_mut_slice())]);
    });
}

/// A kernel that can run between kernels that can't: an instruction, a directive of a head and one of a body, and an array that is too large.
const ODD: &str = ".visible .entry odd() {\n.reg .b32 %r<3>;\nmov.u32 %r1, %clock;\nst.global.u32 [%r1], %r1;\nret;\n}\n\
    .visible .entry clusters() .explicitcluster .reqnctapercluster 2, 1, 1 {\nret;\n}\n\
    .visible .entry fine() {\nret;\n}\n\
    .visible .entry deep() {\n.calls 3;\nret;\n}\n\
    .visible .entry wide() {\n.local .b8 x[5000000000];\nret;\n}\n";

#[test]
fn a_kernel_that_is_not_supported_fails_alone() {
    const NAME: &str = "a_kernel_that_is_not_supported_fails_alone";
    const REFUSED: [(&str, &str); 4] = [
        ("odd", "kernel odd: line 6: `mov.u32 %r1, %clock;`"),
        ("clusters", "kernel clusters: line 10: .explicitcluster is not supported"),
        ("deep", "kernel deep: line 17: .calls is not supported"),
        ("wide", "kernel wide: line 21: the module has more than 4294967296 bytes of variables"),
    ];
    if std::env::var_os("VM_CUDA_FAKE_TEST_CASE").is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", NAME, "--nocapture"]).env("VM_CUDA_FAKE_TEST_CASE", NAME);
        let output = child.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let lines = said.lines().filter(|line| line.starts_with("CUDA on the CPU")).collect::<Vec<_>>();
        assert_eq!(lines.len(), REFUSED.len(), "each reason is printed once: {said}");
        for (line, (_, reason)) in lines.iter().zip(REFUSED) {
            assert!(line.contains(reason), "{said}");
        }
        return;
    }
    let driver = &Driver::load();
    driver.start(0);
    let module = self::module(driver, ODD).unwrap();
    let fine = function(driver, module, "fine");
    let stream = driver.get("cuStreamCreate", &[1]);
    let launch =
        |function, stream| driver.call("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0]);
    for (name, _) in REFUSED {
        let odd = function(driver, module, name);
        // A capture ends without a graph.
        let mut graph = 0u64;
        driver.ok("cuStreamBeginCapture_v2", &[stream, 2]);
        assert_eq!(launch(odd, stream), NOT_SUPPORTED, "{name}");
        assert_eq!(driver.call("cuStreamEndCapture", &[stream, at(&mut graph)]), CAPTURE_INVALIDATED);
        // The error is the launch's alone.
        assert_eq!(launch(odd, stream), NOT_SUPPORTED, "{name}");
        assert_eq!((launch(fine, stream), driver.synchronize()), (0, 0), "{name}");
    }
    let memory = put(driver, &[3, 0, 0, 0]);
    assert_eq!(driver.words(memory, 1), [3]);
}

/// A kernel that prints a format which is a variable, with an int and an address, in blocks as the launch has them.
const PRINT: &str = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n\
    .global .align 1 .b8 text[16] = {37, 100, 32, 37, 115, 10, 0};\n\
    .visible .entry print(.param .u64 string) {\n.reg .b64 %x<9>; .reg .b32 %r<5>; .local .align 8 .b8 depot[16];\n\
    ld.param.u64 %x1, [string]; mov.u32 %r1, %ctaid.x; mov.u64 %x2, depot; cvta.local.u64 %x3, %x2;\n\
    st.local.u32 [%x2], %r1; st.local.u64 [%x2+8], %x1; mov.u64 %x4, text; cvta.global.u64 %x5, %x4;\n\
    { .param .b64 p0; st.param.b64 [p0], %x5; .param .b64 p1; st.param.b64 [p1], %x3; .param .b32 r0;\n\
    call.uni (r0), vprintf, (p0, p1); ld.param.b32 %r2, [r0]; }\nret;\n}\n";

#[test]
fn kernels_print() {
    const NAME: &str = "kernels_print";
    if std::env::var_os("VM_CUDA_FAKE_TEST_CASE").is_none() {
        let output = child(NAME, &[]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        let lines: Vec<&str> =
            said.lines().filter(|line| line.starts_with(|c: char| c == '<' || c.is_ascii_digit())).collect();
        let wanted = [
            "<a wait",
            "0 hello",
            "<a copy",
            "0 (null)",
            "<an event",
            "0 hello",
            "<a format",
            "0%nhello(null)(null)",
            "<the newest",
        ];
        assert_eq!(lines[..wanted.len()], wanted, "{said}");
        // 32 bytes of each, in 4096.
        let newest = &lines[wanted.len()..];
        assert_eq!(newest.len(), 128, "{said}");
        assert!(newest.iter().all(|line| line.ends_with(" hello")), "{said}");
        return;
    }
    let driver = &Driver::load();
    driver.start(0);
    let module = module(driver, PRINT).unwrap();
    let print = function(driver, module, "print");
    let string = put(driver, b"hello\0");
    let mark = |text: &str| {
        println!("<{text}");
        std::io::stdout().flush().unwrap();
    };
    let start = |blocks, string| {
        let mut parameter = string;
        let mut pointer = at(&mut parameter);
        driver.ok("cuLaunchKernel", &[print, blocks, 1, 1, 1, 1, 1, 0, 0, at(&mut pointer)]);
    };
    start(1, string);
    mark("a wait");
    assert_eq!(driver.synchronize(), 0);
    // A string that is nowhere.
    start(1, 64);
    mark("a copy");
    driver.words(string, 1);
    let event = driver.get("cuEventCreate", &[0]);
    start(1, string);
    driver.ok("cuEventRecord", &[event, 0]);
    mark("an event");
    driver.ok("cuEventSynchronize", &[event]);
    // A format that asks for what no argument is.
    let (mut text, mut size, mut name) = (0u64, 0u64, *b"text\0");
    driver.ok("cuModuleGetGlobal_v2", &[at(&mut text), at(&mut size), module, at(&mut name)]);
    let format = |mut bytes: [u8; 12]| driver.ok("cuMemcpyHtoD_v2", &[text, at(&mut bytes), 12]);
    format(*b"%d%n%s%s%s\n\0");
    start(1, string);
    mark("a format");
    assert_eq!(driver.synchronize(), 0);
    format(*b"%d %s\n\0     ");
    driver.ok("cuCtxSetLimit", &[1, 4096]);
    start(200, string);
    mark("the newest");
    assert_eq!(driver.synchronize(), 0);
}

/// A kernel that prints for ever, its own block's number.
const PRINT_ON: &str = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n\
    .global .align 1 .b8 text[8] = {60, 111, 110, 10, 0};\n\
    .visible .entry print(.param .u64 first) {\n.reg .b64 %x<9>; .reg .b32 %r<5>; .local .align 8 .b8 depot[16];\n\
    mov.u64 %x2, depot; cvta.local.u64 %x3, %x2; mov.u64 %x4, text; cvta.global.u64 %x5, %x4;\n\
    again: { .param .b64 p0; st.param.b64 [p0], %x5; .param .b64 p1; st.param.b64 [p1], %x3; .param .b32 r0;\n\
    call.uni (r0), vprintf, (p0, p1); ld.param.b32 %r2, [r0]; }\nbra again;\n}\n";

#[test]
fn a_kernel_that_is_stopped_prints_nothing() {
    const NAME: &str = "a_kernel_that_is_stopped_prints_nothing";
    if std::env::var_os("VM_CUDA_FAKE_TEST_CASE").is_none() {
        let output = child(NAME, &[("VM_CUDA_CPU_SECONDS", "1")]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        assert!(said.contains("<stopped") && !said.contains("<on"), "{said}");
        return;
    }
    let driver = &Driver::load();
    driver.start(0);
    let print = function(driver, module(driver, PRINT_ON).unwrap(), "print");
    assert_eq!(launch(driver, print, [1, 1], 0, vec![0]), TIMEOUT);
    println!("<stopped");
}

/// A kernel that prints its first block, then fails an assertion in the second thread of the block that is passed. The other kernel traps.
const ASSERT: &str = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n\
    .extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 s);\n\
    .global .align 1 .b8 text[8] = {60, 111, 110, 10, 0};\n\
    .global .align 1 .b8 message[6] = {110, 32, 60, 32, 52, 0};\n\
    .global .align 1 .b8 file[5] = {97, 46, 99, 117, 0};\n\
    .global .align 1 .b8 name[8] = {118, 111, 105, 100, 32, 107, 40, 41};\n\
    .visible .entry check(.param .u32 bad) {\n.reg .b64 %x<9>; .reg .b32 %r<9>; .reg .pred %p<4>; .local .align 8 .b8 depot[16];\n\
    ld.param.u32 %r1, [bad]; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %tid.x; mov.u64 %x1, text; mov.u64 %x2, depot; cvta.local.u64 %x3, %x2;\n\
    setp.ne.u32 %p1, %r2, %r1; setp.ne.u32 %p2, %r3, 1; or.pred %p3, %p1, %p2; @%p3 bra out;\n\
    { .param .b64 p0; st.param.b64 [p0], %x1; .param .b64 p1; st.param.b64 [p1], %x3; .param .b32 r0; call.uni (r0), vprintf, (p0, p1); }\n\
    mov.u64 %x4, message; mov.u64 %x5, file; mov.u64 %x6, name; mov.u64 %x7, 1; mov.u32 %r4, 17;\n\
    { .param .b64 p0; st.param.b64 [p0], %x4; .param .b64 p1; st.param.b64 [p1], %x5; .param .b32 p2; st.param.b32 [p2], %r4;\n\
    .param .b64 p3; st.param.b64 [p3], %x6; .param .b64 p4; st.param.b64 [p4], %x7; call.uni __assertfail, (p0, p1, p2, p3, p4); }\n\
    out: ret;\n}\n\
    .visible .entry stop() {\ntrap;\nret;\n}\n";

#[test]
fn a_failed_assertion_ends_the_kernel_at_once() {
    const NAME: &str = "a_failed_assertion_ends_the_kernel_at_once";
    if std::env::var_os("VM_CUDA_FAKE_TEST_CASE").is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        // An endless loop would end with CUDA_ERROR_LAUNCH_TIMEOUT.
        child.args(["--exact", NAME, "--nocapture"]).env("VM_CUDA_FAKE_TEST_CASE", NAME);
        let output = child.env("VM_CUDA_CPU_SECONDS", "20").output().unwrap();
        let [out, errors] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{out}{errors}");
        // The format of CUDA's simpleAssert sample.
        let said = "a.cu:17: void k(): block: [2,0,0], thread: [1,0,0] Assertion `n < 4` failed.\n";
        assert_eq!(errors.matches("Assertion").count(), 1, "{errors}");
        assert!(errors.contains(said), "{errors}");
        assert!(out.contains("<on\n"), "printed before the assertion: {out}");
        return;
    }
    let driver = &Driver::load();
    driver.ok("cuInit", &[0]);
    for (name, parameters, code) in [("check", vec![2], ASSERT_FAILED), ("stop", vec![], LAUNCH_FAILED)] {
        let context = driver.get("cuCtxCreate_v2", &[0, 0]);
        let module = module(driver, ASSERT).unwrap();
        let function = function(driver, module, name);
        if name == "check" {
            assert_eq!(launch(driver, function, [4, 64], 0, vec![9]), 0, "no assertion fails");
        }
        assert_eq!(launch(driver, function, [4, 64], 0, parameters), code);
        assert_eq!(driver.synchronize(), code, "it stays");
        driver.ok("cuCtxDestroy_v2", &[context]);
    }
}

/// A kernel that writes where it is told.
const STORE: &str = ".visible .entry store(.param .u64 to) {\n.reg .b64 %x<2>; .reg .b32 %r<2>;\n\
    ld.param.u64 %x1, [to]; mov.u32 %r1, 9; st.global.u32 [%x1], %r1; ret;\n}\n";

#[test]
fn what_is_not_there_ends_a_kernel_and_its_context() {
    alike("what_is_not_there_ends_a_kernel_and_its_context", &[], |driver| {
        driver.ok("cuInit", &[0]);
        let well = driver.get("cuCtxCreate_v2", &[0, 0]);
        let kept = put(driver, &[1, 0, 0, 0]);
        let reserved = driver.get("cuMemAddressReserve", &[2 * MIB2, 0, 0, 0]);
        driver.ok("cuMemMap", &[reserved, MIB2, 0, driver.create(MIB2, 0, 0), 0]);
        assert_eq!(driver.access(reserved, MIB2, 0, 1), 0);
        // Far beyond an allocation, mapped for reading only, not mapped at all, of no memory at all, and freed.
        for wild in [kept + (1 << 33), reserved, reserved + MIB2, 16, 1 << 50, u64::MAX - 7, 0] {
            let context = driver.get("cuCtxCreate_v2", &[0, 0]);
            let store = function(driver, module(driver, STORE).unwrap(), "store");
            let freed = put(driver, &[0; 4]);
            driver.ok("cuMemFree_v2", &[freed]);
            let wild = if wild == 0 { freed } else { wild };
            assert_eq!(launch(driver, store, [50, 64], 0, vec![wild]), ILLEGAL_ADDRESS, "{wild:#x}");
            assert_eq!(driver.synchronize(), ILLEGAL_ADDRESS, "it stays");
            assert_eq!(launch(driver, store, [1, 1], 0, vec![kept]), ILLEGAL_ADDRESS);
            driver.ok("cuCtxDestroy_v2", &[context]);
            driver.ok("cuCtxSetCurrent", &[well]);
            assert_eq!(driver.words(kept, 1), [1], "the other context is well");
        }
        let store = function(driver, module(driver, STORE).unwrap(), "store");
        assert_eq!(launch(driver, store, [1, 1], 0, vec![kept]), 0);
        assert_eq!(driver.words(kept, 1), [9]);
    });
}

/// Compilers emit accesses to local memory behind `isspacep.local` in kernels that have none, as for libcu++'s atomics.
#[test]
fn memory_that_a_kernel_does_not_have_is_not_there() {
    alike("memory_that_a_kernel_does_not_have_is_not_there", &[], |driver| {
        driver.ok("cuInit", &[0]);
        for space in ["local", "shared"] {
            let context = driver.get("cuCtxCreate_v2", &[0, 0]);
            let text = format!(
                ".visible .entry store(.param .u64 to, .param .u32 always) {{\n\
                 .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<3>;\n\
                 ld.param.u64 %rd1, [to]; ld.param.u32 %r1, [always]; mov.u32 %r2, 9;\n\
                 setp.ne.u32 %p1, %r1, 0; @%p1 bra near; isspacep.{space} %p1, %rd1; @%p1 bra near;\n\
                 st.u32 [%rd1], %r2; ret;\n\
                 near: cvta.to.{space}.u64 %rd2, %rd1; st.{space}.u32 [%rd2], %r2; ret;\n}}"
            );
            let store = function(driver, module(driver, &text).unwrap(), "store");
            let to = put(driver, &[0; 4]);
            assert_eq!(launch(driver, store, [1, 1], 0, vec![to, 0]), 0, "{space}");
            assert_eq!(driver.words(to, 1), [9], "{space}");
            assert_eq!(launch(driver, store, [1, 1], 0, vec![to, 1]), ILLEGAL_ADDRESS, "{space}");
            driver.ok("cuCtxDestroy_v2", &[context]);
        }
    });
}

/// A `cp.async` of 0 bytes, or with a false predicate, does not access its source.
#[test]
fn copies_of_nothing_read_nothing() {
    alike("copies_of_nothing_read_nothing", &[], |driver| {
        driver.start(0);
        let copies = [
            "cp.async.ca.shared.global [%r2], [%rd1], 16, 0;",
            "cp.async.ca.shared.global [%r2], [%rd1], 16, %r1;",
            "setp.eq.u32 %p1, %r1, 0; cp.async.ca.shared.global [%r2], [%rd1], 16, %p1;",
            "setp.ne.u32 %p1, %r1, 0; @%p1 cp.async.ca.shared.global [%r2], [%rd1], 16;",
        ];
        for copy in copies {
            let text = format!(
                ".visible .entry copy(.param .u64 from, .param .u64 out, .param .u32 size) {{\n\
                 .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<4>; .shared .align 16 .b8 s[16];\n\
                 ld.param.u64 %rd1, [from]; ld.param.u64 %rd2, [out]; ld.param.u32 %r1, [size];\n\
                 mov.u32 %r2, s; mov.u32 %r3, 0; st.shared.v4.u32 [%r2], {{%r3, %r3, %r3, %r3}};\n\
                 {copy}\n cp.async.wait_all; ld.shared.u32 %r3, [%r2+12]; st.global.u32 [%rd2], %r3; ret;\n}}"
            );
            let module = module(driver, &text).unwrap();
            let out = put(driver, &[0xff; 4]);
            let copy = function(driver, module, "copy");
            assert_eq!(launch(driver, copy, [1, 1], 0, vec![0, out, 0]), 0, "{text}");
            assert_eq!(driver.words(out, 1), [0], "{text}");
        }
    });
}

#[test]
fn a_branch_may_end_with_a_warps_barrier() {
    alike("a_branch_may_end_with_a_warps_barrier", &[], |driver| {
        driver.start(0);
        let body = ".visible .entry pair(.param .u64 out) {\n.reg .b64 %x<3>; .reg .b32 %r<5>; .reg .pred %p<3>;\n\
            .shared .align 4 .b8 s[128];\n\
            ld.param.u64 %x1, [out]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.s32 %r3, %r3, %r2;\n\
            st.shared.u32 [%r3], %r1; bar.sync 0; setp.gt.u32 %p1, %r1, 1; @%p1 bra behind;\n\
            ld.shared.u32 %r4, [%r3+8]; st.shared.u32 [%r3], %r4; bar.warp.sync -1;\n\
            behind: setp.ne.u32 %p2, %r1, 0; @%p2 bra done;\n\
            ld.shared.u32 %r4, [s+4]; st.global.u32 [%x1], %r4;\ndone: ret;\n}\n";
        let pair = function(driver, module(driver, body).unwrap(), "pair");
        let out = put(driver, &[0; 4]);
        assert_eq!(launch(driver, pair, [1, 32], 0, vec![out]), 0);
        assert_eq!(driver.words(out, 1), [3]);
    });
}

#[test]
fn kernels_reach_memory_of_the_host() {
    alike("kernels_reach_memory_of_the_host", &[], |driver| {
        driver.start(0);
        let store = function(driver, module(driver, STORE).unwrap(), "store");
        for memory in [driver.get("cuMemHostAlloc", &[8, 0]), driver.get("cuMemAllocManaged", &[8, 1])] {
            assert_eq!(launch(driver, store, [1, 1], 0, vec![memory + 4]), 0);
            // SAFETY: the driver allocated it, and nothing runs.
            let words =
                unsafe { std::ptr::with_exposed_provenance::<[u32; 2]>(memory as usize).read_volatile() };
            assert_eq!(words, [0, 9]);
        }
    });
}

#[test]
fn blocks_do_not_wait_for_each_other() {
    alone("blocks_do_not_wait_for_each_other", &[], |driver| {
        driver.start(0);
        let fine = function(driver, module(driver, ".visible .entry fine() {\nret;\n}\n").unwrap(), "fine");
        let launch = |grid| driver.call("cuLaunchCooperativeKernel", &[fine, grid, 1, 1, 32, 1, 1, 0, 0, 0]);
        assert_eq!([launch(1), launch(2)], [0, TOO_LARGE]);
    });
}

#[test]
fn a_fault_of_the_program_itself_ends_it() {
    if std::env::var_os("VM_CUDA_FAKE_TEST_CASE").is_none() {
        let output = child("a_fault_of_the_program_itself_ends_it", &[]);
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(output.status.signal(), Some(11), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let driver = Driver::load();
    driver.start(0);
    let store = function(&driver, module(&driver, STORE).unwrap(), "store");
    let memory = put(&driver, &[0; 4]);
    assert_eq!(launch(&driver, store, [1, 1], 0, vec![memory]), 0);
    driver.ok("cuMemFree_v2", &[memory]);
    // SAFETY: it is the process's end.
    unsafe { std::ptr::with_exposed_provenance::<u32>(memory as usize).read_volatile() };
}

#[test]
fn a_kernel_without_an_end_is_ended() {
    alone("a_kernel_without_an_end_is_ended", &[("VM_CUDA_CPU_SECONDS", "1")], |driver| {
        driver.start(0);
        let body = ".visible .entry spin(.param .u64 on) {\n.reg .b64 %x<2>; .reg .b32 %r<2>; .reg .pred %p;\n\
            ld.param.u64 %x1, [on];\nagain: ld.volatile.global.u32 %r1, [%x1]; setp.eq.u32 %p, %r1, 0; @%p bra again; ret;\n}\n";
        let spin = function(driver, module(driver, body).unwrap(), "spin");
        let on = put(driver, &[0; 4]);
        assert_eq!(launch(driver, spin, [8, 32], 0, vec![on]), TIMEOUT);
    });
}

#[test]
fn what_is_for_tests_of_hooks_has_no_effect() {
    let variables = [("VM_CUDA_FAKE_MEMORY", "4096"), ("VM_CUDA_FAKE_FAIL", "cuMemAlloc:1=2")];
    alone("what_is_for_tests_of_hooks_has_no_effect", &variables, |driver| {
        driver.start(0);
        let mut bytes = 0u64;
        driver.ok("cuDeviceTotalMem_v2", &[at(&mut bytes), 0]);
        assert_eq!(bytes, 1 << 30);
        put(driver, &[0; 4]);
        let (mut image, mut module) = (*b"vm-cuda-fake\n\0", 0u64);
        assert_ne!(driver.call("cuModuleLoadData", &[at(&mut module), at(&mut image)]), 0);
    });
}
