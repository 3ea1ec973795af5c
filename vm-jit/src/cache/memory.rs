//! The entries used last, up to a number of bytes.

use super::Key;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Memory {
    entries: HashMap<Key, (u64, Arc<[u8]>)>,
    /// By when they were used.
    order: BTreeMap<u64, Key>,
    clock: u64,
    bytes: usize,
    limit: usize,
}

impl Memory {
    pub(super) fn new(limit: usize) -> Memory {
        Memory { entries: HashMap::new(), order: BTreeMap::new(), clock: 0, bytes: 0, limit }
    }

    pub(super) fn get(&mut self, key: &Key) -> Option<Arc<[u8]>> {
        let (used, bytes) = self.entries.get_mut(key)?;
        self.order.remove(used);
        self.clock += 1;
        *used = self.clock;
        self.order.insert(self.clock, *key);
        Some(bytes.clone())
    }

    pub(super) fn put(&mut self, key: Key, bytes: Arc<[u8]>) {
        self.remove(&key);
        if bytes.len() > self.limit {
            return;
        }
        self.clock += 1;
        self.bytes += bytes.len();
        self.order.insert(self.clock, key);
        self.entries.insert(key, (self.clock, bytes));
        while self.bytes > self.limit {
            let Some((_, oldest)) = self.order.first_key_value() else { return };
            self.remove(&oldest.clone());
        }
    }

    pub(super) fn remove(&mut self, key: &Key) {
        if let Some((used, bytes)) = self.entries.remove(key) {
            self.order.remove(&used);
            self.bytes -= bytes.len();
        }
    }
}
