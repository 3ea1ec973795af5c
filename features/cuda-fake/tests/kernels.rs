//! Kernels of PTX by the driver's API: what nvcc made, with and without faults in it, on the host's processor.

#![allow(unsafe_code)]

mod common;

use common::*;
use std::path::Path;

const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NO_BINARY: Code = 209;
const INVALID_PTX: Code = 218;
const TIMEOUT: Code = 702;

/// What nvcc made of the kernels of vm-ptx's tests.
fn file(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ptx/tests/kernels").join(name);
    let mut bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    bytes.push(0);
    bytes
}

/// A module of a text that is not of nvcc.
fn module(driver: &Driver, body: &str) -> Result<u64, Code> {
    let mut text = format!(".version 8.0\n.target sm_75\n.address_size 64\n{body}\0").into_bytes();
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
