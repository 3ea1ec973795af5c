//! Text on COM1.

use core::fmt;

use crate::sys;

const DATA: u16 = 0x3f8;
const LINE_STATUS: u16 = DATA + 5;
const TRANSMITTER_EMPTY: u8 = 0x20;

/// COM1 as a writer.
pub struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // A missing port reads all ones, which has the bit set too; a stuck one is given up on.
            let _ = (0..1000).find(|_| sys::in8(LINE_STATUS) & TRANSMITTER_EMPTY != 0);
            sys::out8(DATA, byte);
        }
        Ok(())
    }
}

macro_rules! print {
    ($($argument:tt)*) => {{
        use core::fmt::Write as _;
        // Writing to the port cannot fail.
        let _ = write!($crate::serial::Serial, $($argument)*);
    }};
}
pub(crate) use print;

macro_rules! println {
    () => { $crate::serial::println!("") };
    ($($argument:tt)*) => {{
        use core::fmt::Write as _;
        // Writing to the port cannot fail.
        let _ = writeln!($crate::serial::Serial, $($argument)*);
    }};
}
pub(crate) use println;
