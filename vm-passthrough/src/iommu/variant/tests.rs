use super::*;
use crate::pci;
use crate::sim::{SimFunction, SimHost};

const ALIASES: &str = "lib/modules/6.12.0/modules.alias";

/// A host with a network card of Mellanox whose lists are these, and what is chosen for it.
fn choose(aliases: &str, builtin: &str, loaded: &[(&str, &str)], wanted: &VfioDriver) -> DriverChoice {
    let sim = SimHost::new().unwrap();
    let address = "0000:01:00.0".parse().unwrap();
    let card = SimFunction::new(address, 0x15b3, 0x101e, 0x02_0000).subsystem(0x15b3, 0x0001).group(1);
    sim.add(&card.driver("mlx5_core")).unwrap();
    sim.write(ALIASES, aliases).unwrap();
    sim.write("lib/modules/6.12.0/modules.builtin.modinfo", builtin).unwrap();
    for (module, driver) in loaded {
        sim.write(&format!("sys/module/{module}/drivers/pci:{driver}/uevent"), "").unwrap();
    }
    let host = sim.plain_host();
    let function = pci::read_function(&host, address).unwrap();
    VfioDrivers::read(&host).choose(&function, wanted, true)
}

#[test]
fn the_alias_with_the_fewest_wildcards_wins() {
    fn check(aliases: &[&str], loaded: &[(&str, &str)], expect: &str) {
        let text: String = aliases.iter().map(|alias| format!("alias {alias}\n")).collect();
        let choice = choose(&text, "", loaded, &VfioDriver::Best);
        assert!(choice.to_string().starts_with(expect), "{choice}");
        // Those that are part of the Linux kernel are listed elsewhere.
        let builtin = aliases.iter().filter_map(|alias| alias.split_once(' '));
        let builtin: String = builtin.map(|(alias, module)| format!("{module}.alias={alias}\0")).collect();
        assert_eq!(choose("", &builtin, loaded, &VfioDriver::Best).driver, choice.driver);
    }
    const MLX5: &str = "vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci";
    const ALL: &str = "vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci";
    let mlx5 = [("mlx5_vfio_pci", "mlx5_vfio_pci")];
    let none = "vfio-pci, as no variant of it is made for this device";
    check(&[], &mlx5, none);
    check(&[ALL], &mlx5, none);
    check(&[ALL, MLX5], &mlx5, "mlx5_vfio_pci, which is made for it (vfio_pci:v000015B3d0000101E");
    check(&[MLX5, ALL], &[], "vfio-pci, as mlx5_vfio_pci, which is made for it, is not loaded");
    // A driver need not be called as its module is.
    check(&["vfio_pci:v000015B3d*sv*sd*bc*sc*i* pds-vfio"], &[("pds_vfio", "pds-vfio-pci")], "pds-vfio-pci");
    let finer = "vfio_pci:v000015B3d0000101Esv000015B3sd*bc02sc*i* finer_vfio_pci";
    let both = [mlx5[0], ("finer_vfio_pci", "finer_vfio_pci")];
    check(&[MLX5, finer, ALL], &both, "finer_vfio_pci");
    check(&[finer, MLX5], &both, "finer_vfio_pci");
    check(
        &["vfio_pci:v000015B3d0000101Fsv*sd*bc*sc*i* other_vfio_pci"],
        &[("other_vfio_pci", "other_vfio_pci")],
        none,
    );
    // What drivers of the host are for is none of VFIO's.
    check(&["pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_core"], &[("mlx5_core", "mlx5_core")], none);
    // A module that registers no VFIO driver.
    check(&["vfio_pci:v*d*sv*sd*bc*sc*i* x"], &[("x", "nvidia")], "vfio-pci, as x, which");
}

#[test]
fn one_is_asked_for_by_name() {
    let aliases = "alias vfio_pci:v000015B3d*sv*sd*bc*sc*i* mlx5_vfio_pci\n";
    for name in ["vfio-pci", "other_vfio_pci"] {
        let choice =
            choose(aliases, "", &[("mlx5_vfio_pci", "mlx5_vfio_pci")], &VfioDriver::Named(name.into()));
        assert_eq!(choice, DriverChoice { driver: name.into(), reason: DriverReason::Named });
    }
}

#[test]
fn hostile_lists_are_bounded() {
    let stars = format!("alias vfio_pci:{}x mlx5_vfio_pci\n", "*0".repeat(43));
    let lists = [
        stars.repeat(100_000),
        "alias vfio_pci:v* ../../mlx5_vfio_pci\n".into(),
        format!("alias vfio_pci:{}\n", "*".repeat(1 << 20)),
        "alias \0 vfio_pci:\u{fffd}*\nalias\nalias \n\n".into(),
        format!("alias vfio_pci:{} mlx5_vfio_pci\n", "*".repeat(200)),
    ];
    for list in lists {
        let loaded = [("mlx5_vfio_pci", "mlx5_vfio_pci")];
        assert_eq!(choose(&list, "", &loaded, &VfioDriver::Best).reason, DriverReason::NoVariant);
    }
}

#[test]
fn globs() {
    fn check(pattern: &str, text: &str, expect: bool) {
        assert_eq!(matches(pattern, text), expect, "{pattern} {text}");
    }
    check("", "", true);
    check("*", "", true);
    check("", "a", false);
    check("a*c", "abbc", true);
    check("a*c", "abbcd", false);
    check("a*b*c", "aXbYbZc", true);
    check("*a", "aaab", false);
    check("a", "ab", false);
    check("ab", "a", false);
    check("**b", "ab", true);
    check("?", "a", false);
    check(&"*a".repeat(48), &"a".repeat(4096), true);
    check(&format!("{}b", "*a".repeat(47)), &"a".repeat(4096), false);
}
