//! The package for Go: `go vet` has nothing to say, and its tests pass, also with the race detector, with the library as it is installed.

mod common;

use std::path::Path;
use std::process::Command;

#[test]
fn the_package_for_go() {
    if Command::new("go").arg("version").output().is_err()
        || Command::new("pkg-config").arg("--version").output().is_err()
    {
        println!("skipped: Go or pkg-config is not here: install golang-go and pkg-config");
        return;
    }
    let prefix = common::installed();
    for arguments in
        [&["vet", "./..."][..], &["test", "-count=1", "./..."], &["test", "-count=1", "-race", "./..."]]
    {
        let mut go = Command::new("go");
        go.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../bindings/go"));
        go.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
            .env("GOFLAGS", "-mod=mod")
            .env("GOPROXY", "off");
        common::run_command(go.args(arguments));
    }
    let unformatted =
        common::run("gofmt", &["-l", concat!(env!("CARGO_MANIFEST_DIR"), "/../../../bindings/go")]);
    assert_eq!(unformatted, "");
}
