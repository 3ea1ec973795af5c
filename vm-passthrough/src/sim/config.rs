//! Bytes of a simulated config space.

/// Puts the config space of an endpoint together.
#[derive(Clone, Debug)]
pub struct SimConfig {
    bytes: Vec<u8>,
    /// Where the link to the next capability goes, and to the next extended one.
    link: usize,
    extended_link: Option<usize>,
}

impl SimConfig {
    /// An endpoint with a type 0 header, no BARs and no capabilities, with 4096 bytes of config space.
    pub fn new(vendor: u16, device: u16, class: u32) -> Self {
        let mut config = Self { bytes: vec![0; 4096], link: 0x34, extended_link: None };
        config.put(0x00, &vendor.to_le_bytes());
        config.put(0x02, &device.to_le_bytes());
        config.put(0x08, &(class << 8 | 1).to_le_bytes());
        config.put(0x2c, &[0x34, 0x12, 0x78, 0x56]);
        config
    }

    /// Sets bytes. What lies past the end is left out.
    pub fn put(&mut self, offset: usize, bytes: &[u8]) -> &mut Self {
        for (place, &byte) in self.bytes.iter_mut().skip(offset).zip(bytes) {
            *place = byte;
        }
        self
    }

    /// Adds a capability at `offset` to the end of the list; `body` follows the two bytes of ID and link.
    pub fn capability(&mut self, id: u8, offset: u8, body: &[u8]) -> &mut Self {
        self.put(0x06, &[0x10]);
        self.put(self.link, &[offset]);
        self.link = usize::from(offset) + 1;
        self.put(offset.into(), &[id, 0]);
        self.put(usize::from(offset) + 2, body)
    }

    /// Adds an extended capability at `offset`, the first at 0x100; `body` follows the four bytes of its header.
    pub fn extended(&mut self, id: u16, offset: u16, body: &[u8]) -> &mut Self {
        if let Some(link) = self.extended_link.replace(offset.into()) {
            let [low, high] = (offset << 4).to_le_bytes();
            let version = self.bytes[link + 2];
            self.put(link + 2, &[low | version, high]);
        }
        let [low, high] = id.to_le_bytes();
        self.put(offset.into(), &[low, high, 1, 0]);
        self.put(usize::from(offset) + 4, body)
    }

    /// The bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.bytes.clone()
    }
}
