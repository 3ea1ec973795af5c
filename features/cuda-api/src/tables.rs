//! The driver's tables for NVIDIA's own libraries, which `cuGetExportTable` gives by a name of 16 bytes. They are documented nowhere; what is
//! known of them is public through projects that stand for the driver, as ZLUDA. The first entry of each but [`Table::Storage`] is its
//! length in bytes.

/// A table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Table {
    /// The runtime's: loading of modules, the primary context.
    Runtime,
    /// Tools' storage per thread.
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
}

const NAMES: [(Table, u128); 9] = [
    (Table::Runtime, 0x6bd5fb6c_5bf4_e74a_8987_d93912fd9df9),
    (Table::Threads, 0x42d85a81_23f6_cb47_8298_f6e78a3aecdc),
    (Table::Callbacks, 0xa094798c_2e74_2e74_93f2_0800200c0a66),
    (Table::Storage, 0xc693336e_1121_df11_a8c3_68f355d89593),
    (Table::Creation, 0x0ca50b8c_1004_929a_89a7_d0df10e77286),
    (Table::Heap, 0x195bcbf4_d67d_024a_acc5_1d29cea631ae),
    (Table::Devices, 0xb10541e1_f7c7_c74a_9f64_f223be99f1e2),
    (Table::Check, 0xd4082055_bde6_704b_8d34_ba123c66e1f2),
    (Table::Contexts, 0x263e8860_7cd2_6143_92f6_bbd5006dfa7e),
];

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
