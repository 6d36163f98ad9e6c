package netpol

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"os/exec"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

const (
	// table is mangle, whose FORWARD chain nobody else uses and which comes before what kube-proxy accepts in filter.
	table      = "mangle"
	settle     = 100 * time.Millisecond // changes come in bursts
	checkEvery = 5 * time.Second        // somebody else may have flushed the table
)

// Run keeps the rules of the node with this address as the policies say, until the context ends. Before it has read
// everything once, and while the API server is away, what was written last stays.
func Run(ctx context.Context, client kubernetes.Interface, hostIP string) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(slim))
	changed := make(chan struct{}, 1)
	notice := func() {
		select {
		case changed <- struct{}{}:
		default: // it is noted already
		}
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notice() },
		UpdateFunc: func(any, any) { notice() },
		DeleteFunc: func(any) { notice() },
	}
	policies := factory.Networking().V1().NetworkPolicies()
	pods := factory.Core().V1().Pods()
	namespaces := factory.Core().V1().Namespaces()
	for _, informer := range []cache.SharedIndexInformer{policies.Informer(), pods.Informer(), namespaces.Informer()} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			log.Printf("policies are not enforced: %v", err) // only an informer that was stopped refuses
			return
		}
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	w := writer{}
	for ctx.Err() == nil {
		state, err := State{}, error(nil)
		if state.Policies, err = policies.Lister().List(labels.Everything()); err == nil {
			if state.Pods, err = pods.Lister().List(labels.Everything()); err == nil {
				state.Namespaces, err = namespaces.Lister().List(labels.Everything())
			}
		}
		if err == nil {
			err = w.write(Chains(state, hostIP))
		}
		if err != nil {
			log.Printf("policies: %v", err)
		}
		time.Sleep(settle)
		select {
		case <-changed:
		case <-time.After(checkEvery):
		case <-ctx.Done():
		}
	}
}

// slim drops what no rule follows from: the agent has little memory.
func slim(object any) (any, error) {
	if p, ok := object.(*corev1.Pod); ok {
		for _, containers := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
			for i, c := range containers {
				containers[i] = corev1.Container{Name: c.Name, Ports: c.Ports}
			}
		}
		p.Spec = corev1.PodSpec{
			HostNetwork: p.Spec.HostNetwork, InitContainers: p.Spec.InitContainers, Containers: p.Spec.Containers,
		}
		p.Status = corev1.PodStatus{Phase: p.Status.Phase, HostIP: p.Status.HostIP, PodIPs: p.Status.PodIPs}
	}
	if m, ok := object.(metav1.Object); ok {
		m.SetManagedFields(nil)
		m.SetAnnotations(nil)
	}
	return object, nil
}

// writer brings chains into the kernel and knows which are there.
type writer struct {
	have    []string // names of our chains in the kernel
	written string
}

func (w *writer) write(chains []Chain) error {
	want := Script(table, chains, nil)
	if want == w.written && iptables("-C", "FORWARD", "-j", topChain) == nil {
		return nil
	}
	if want == w.written || w.written == "" { // the first time, or the kernel is not as it was left
		found, err := present()
		if err != nil {
			return err
		}
		w.have, w.written = found, ""
	}
	var names, stale []string
	for _, c := range chains {
		names = append(names, c.Name)
	}
	for _, name := range w.have {
		if !slices.Contains(names, name) {
			stale = append(stale, name)
		}
	}
	restore := exec.Command("iptables-restore", "-w", "5", "--noflush")
	restore.Stdin = strings.NewReader(Script(table, chains, stale))
	if out, err := restore.CombinedOutput(); err != nil {
		w.written = ""
		return fmt.Errorf("iptables-restore: %w: %s", err, out)
	}
	w.have, w.written = names, want
	if iptables("-C", "FORWARD", "-j", topChain) != nil {
		if err := iptables("-I", "FORWARD", "-j", topChain); err != nil {
			w.written = ""
			return err
		}
	}
	log.Printf("policies: %d chains of pods", len(names)-1)
	return nil
}

func present() ([]string, error) {
	out, err := exec.Command("iptables-save", "-t", table).Output()
	if err != nil {
		return nil, fmt.Errorf("iptables-save: %w", err)
	}
	var found []string
	for line := range bytes.Lines(out) {
		if name, ok := strings.CutPrefix(string(line), ":"+chainPrefix); ok {
			found = append(found, chainPrefix+strings.Fields(name)[0])
		}
	}
	return found, nil
}

func iptables(args ...string) error {
	out, err := exec.Command("iptables", append([]string{"-w", "5", "-t", table}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("iptables %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}
