//! The driver's tables for NVIDIA's own libraries, which `cuGetExportTable` gives by a name of 16 bytes. They are documented nowhere; what is
//! known of them is public through projects that stand for the driver, as ZLUDA. The first entry of each but [`Table::Storage`] is its
//! length in bytes.

use hmac::{Hmac, Mac};
use md2::Md2;

/// A table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Table {
    /// The runtime's: loading of modules, the primary context.
    Runtime,
    /// Of threads: the current context.
    Threads,
    /// Tools' callbacks: buffers that they and the runtime share.
    Callbacks,
    /// What libraries keep of a context: put, delete, get.
    Storage,
    /// Contexts that tools do not see.
    Creation,
    /// The driver's heap.
    Heap,
    /// More of devices.
    Devices,
    /// What the runtime checks the driver by.
    Check,
    /// Checks of a context.
    Contexts,
    /// More of contexts and streams: the number of each.
    Numbers,
    /// Where a device's multiprocessors are: which of which cluster each pair is. cuBLASLt chooses by it.
    Topology,
    /// More of modules: their functions. cuFFT finds its own by it.
    Functions,
}

const NAMES: [(Table, u128); 12] = [
    (Table::Runtime, 0x6bd5fb6c_5bf4_e74a_8987_d93912fd9df9),
    (Table::Threads, 0x42d85a81_23f6_cb47_8298_f6e78a3aecdc),
    (Table::Callbacks, 0xa094798c_2e74_2e74_93f2_0800200c0a66),
    (Table::Storage, 0xc693336e_1121_df11_a8c3_68f355d89593),
    (Table::Creation, 0x0ca50b8c_1004_929a_89a7_d0df10e77286),
    (Table::Heap, 0x195bcbf4_d67d_024a_acc5_1d29cea631ae),
    (Table::Devices, 0xb10541e1_f7c7_c74a_9f64_f223be99f1e2),
    (Table::Check, 0xd4082055_bde6_704b_8d34_ba123c66e1f2),
    (Table::Contexts, 0x263e8860_7cd2_6143_92f6_bbd5006dfa7e),
    (Table::Numbers, 0x21318c60_9714_3248_8ca6_41ff7324c8f2),
    (Table::Topology, 0x1734dc26_800d_4745_8726_c0f1e7dd8bca),
    (Table::Functions, 0x6e163fbe_b958_444d_835c_e182aff1991e),
];

/// Tables that runtimes, NVML and compilers (for what they keep compiled) do without where they are refused.
const SPARED: [u128; 3] = [
    0xf8cff951_2146_8b4e_b9e2_fb469e7c0dd9,
    0x69a28e9f_2449_8b47_b030_c5da330ea4e9,
    0xda9151d3_3ae6_cc41_a5c0_4f26d533e328,
];

/// Is it a table that who asks for it does without?
#[must_use]
pub fn is_spared(name: &[u8; 16]) -> bool {
    SPARED.contains(&u128::from_be_bytes(*name))
}

/// The table of a name.
#[must_use]
pub fn named(name: &[u8; 16]) -> Option<Table> {
    let name = u128::from_be_bytes(*name);
    NAMES.iter().find(|(_, known)| *known == name).map(|(table, _)| *table)
}

/// The name of a table.
#[must_use]
pub fn name_of(table: Table) -> [u8; 16] {
    NAMES.iter().find(|(known, _)| *known == table).map_or([0; 16], |(_, name)| name.to_be_bytes())
}

/// What the runtime asks of [`Table::Check`], and what goes into the answer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Question {
    /// The driver's version of CUDA.
    pub driver: u32,
    /// What is asked: the runtime's version, with 0, 1 and 2 as its last digit in turn.
    pub version: u32,
    /// The process's number.
    pub process: u32,
    /// The lower half of what `pthread_self` says.
    pub thread: u32,
    /// Where [`Table::Runtime`] is.
    pub runtime: u64,
    /// Where [`Table::Check`] is.
    pub check: u64,
    /// Where its function is.
    pub function: u64,
    /// The seconds that the runtime asks with.
    pub seconds: u64,
}

/// A device in the answer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Device {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Domain, bus and device of PCI.
    pub place: [i32; 3],
}

/// The answer that runtimes expect of any driver: a keyed digest of the question and of all devices.
#[must_use]
pub fn answer(question: &Question, devices: &[Device]) -> [u64; 2] {
    const KEY: [u8; 16] = 0x146a_ddae_53a9_a752_aa08_4136_0bf5_5a9f_u128.to_be_bytes();
    const FIXED: [u64; 2] = [0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8];
    match question.version % 10 {
        0 => return FIXED,
        1 => return [FIXED[0] & 0xff_ffff_ffff_ffff | 0x18 << 56, FIXED[1]],
        _ => {}
    }
    let Ok(mut digest) = Hmac::<Md2>::new_from_slice(&KEY) else { return FIXED };
    for word in [question.driver, question.version, question.process, question.thread] {
        digest.update(&word.to_le_bytes());
    }
    for word in [question.runtime, question.check, question.function, question.seconds] {
        digest.update(&word.to_le_bytes());
    }
    for device in devices {
        digest.update(&device.uuid);
        device.place.iter().for_each(|word| digest.update(&word.to_le_bytes()));
    }
    let bytes: [u8; 16] = digest.finalize().into_bytes().into();
    let word = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    [word(0), word(8)]
}
