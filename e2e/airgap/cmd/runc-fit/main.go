// runc-fit is an OCI runtime for machines whose processes lack some capability, CAP_SYS_RESOURCE above
// all. `docker run --privileged` asks runc for every capability the kernel knows, and runc refuses with
// "unable to apply caps". runc-fit strikes out of the OCI configuration what this process does not hold
// itself (capabilities, an oom_score_adj below its own, resource limits above its own) and then becomes
// runc. It adds no right: it asks for less.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// In the order of their numbers in linux/capability.h.
var capabilities = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP
LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD
LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
PERFMON BPF CHECKPOINT_RESTORE`)

// Numbers of asm-generic/resource.h; the syscall package does not name them all.
var limits = map[string]int{"RLIMIT_CORE": 4, "RLIMIT_NPROC": 6, "RLIMIT_NOFILE": 7, "RLIMIT_MEMLOCK": 8}

func main() {
	runc, err := exec.LookPath("runc")
	if err != nil {
		fail(err)
	}
	verb, bundle, process := parse(os.Args[1:])
	switch {
	case verb == "create" || verb == "run":
		err = fitFile(filepath.Join(bundle, "config.json"), true)
	case verb == "exec" && process != "":
		err = fitFile(process, false)
	}
	if err != nil {
		fail(err)
	}
	fail(syscall.Exec(runc, append([]string{runc}, os.Args[1:]...), os.Environ()))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "runc-fit:", err)
	os.Exit(127)
}

// parse finds runc's verb and the two options that name a configuration file.
func parse(args []string) (verb, bundle, process string) {
	bundle = "."
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		if !joined && i+1 < len(args) {
			value = args[i+1]
		}
		switch {
		case verb == "" && (arg == "create" || arg == "run" || arg == "exec"):
			verb = arg
		case name == "--bundle" || name == "-b":
			bundle = value
		case name == "--process" || name == "-p":
			process = value
		}
	}
	return verb, bundle, process
}

// fitFile rewrites one OCI file: a whole container configuration, or a process alone.
func fitFile(path string, whole bool) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var doc map[string]any
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber() // 64-bit limits must survive the round trip
	if err := decoder.Decode(&doc); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	process := doc
	if whole {
		process, _ = doc["process"].(map[string]any)
	}
	fitProcess(process)
	out, err := json.Marshal(doc)
	if err != nil {
		return err
	}
	return os.WriteFile(path, out, 0o644)
}

func fitProcess(process map[string]any) {
	held := heldCapabilities()
	sets, _ := process["capabilities"].(map[string]any)
	for set, value := range sets {
		asked, _ := value.([]any)
		kept := []any{}
		for _, c := range asked {
			if name, _ := c.(string); held[name] {
				kept = append(kept, c)
			}
		}
		sets[set] = kept
	}
	if held["CAP_SYS_RESOURCE"] {
		return // then every limit and score may be set
	}
	if asked, ok := number(process["oomScoreAdj"]); ok {
		raw, _ := os.ReadFile("/proc/self/oom_score_adj")
		if own, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil && asked < float64(own) {
			process["oomScoreAdj"] = own
		}
	}
	asked, _ := process["rlimits"].([]any)
	for _, value := range asked {
		if limit, ok := value.(map[string]any); ok {
			fitLimit(limit)
		}
	}
}

func fitLimit(limit map[string]any) {
	kind, _ := limit["type"].(string)
	resource, known := limits[kind]
	var own syscall.Rlimit
	if !known || syscall.Getrlimit(resource, &own) != nil {
		return
	}
	for _, bound := range []string{"hard", "soft"} {
		if asked, ok := number(limit[bound]); ok && asked > float64(own.Max) {
			limit[bound] = own.Max
		}
	}
}

// heldCapabilities reads this process's bounding set.
func heldCapabilities() map[string]bool {
	held := map[string]bool{}
	status, _ := os.ReadFile("/proc/self/status")
	for _, line := range strings.Split(string(status), "\n") {
		value, found := strings.CutPrefix(line, "CapBnd:")
		if !found {
			continue
		}
		mask, _ := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		for bit, name := range capabilities {
			held["CAP_"+name] = mask&(1<<uint(bit)) != 0
		}
	}
	return held
}

func number(value any) (float64, bool) {
	n, ok := value.(json.Number)
	if !ok {
		return 0, false
	}
	f, err := n.Float64()
	return f, err == nil
}
