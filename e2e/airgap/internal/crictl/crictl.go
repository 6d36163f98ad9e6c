// Package crictl is the part of crictl that kind and the image loader call on a node: `inspecti` and
// `images`, with `ps`, `pods` and `rmi` to look around. The original (sigs.k8s.io/cri-tools) has no
// entry in the Go checksum database, and the checksum check stays on.
package crictl

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	cri "k8s.io/cri-api/pkg/apis"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
	remote "k8s.io/cri-client/pkg"
	"k8s.io/klog/v2"
)

const (
	defaultEndpoint = "unix:///run/containerd/containerd.sock"
	callTimeout     = 10 * time.Second
	usage           = "usage: crictl inspecti IMAGE | images | rmi IMAGE | ps | pods"
)

// Main runs one command and ends the process with status 1 on any error.
func Main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crictl:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf(usage)
	}
	endpoint := os.Getenv("CONTAINER_RUNTIME_ENDPOINT")
	if endpoint == "" {
		endpoint = defaultEndpoint
	}
	last := args[len(args)-1] // kind puts options before the image
	switch args[0] {
	case "inspecti":
		return inspect(ctx, endpoint, last)
	case "images":
		return listImages(ctx, endpoint)
	case "rmi":
		images, err := imageService(endpoint)
		if err != nil {
			return err
		}
		return images.RemoveImage(ctx, &runtime.ImageSpec{Image: last})
	case "ps":
		return listContainers(ctx, endpoint)
	case "pods":
		return listPods(ctx, endpoint)
	}
	return fmt.Errorf("unknown command %q; %s", args[0], usage)
}

func inspect(ctx context.Context, endpoint, name string) error {
	images, err := imageService(endpoint)
	if err != nil {
		return err
	}
	found, err := images.ImageStatus(ctx, &runtime.ImageSpec{Image: name}, true)
	if err != nil {
		return err
	}
	if found.Image == nil {
		return fmt.Errorf("no such image %q present", name)
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	return out.Encode(map[string]any{"status": map[string]any{
		"id":          found.Image.Id,
		"repoTags":    found.Image.RepoTags,
		"repoDigests": found.Image.RepoDigests,
		"size":        fmt.Sprint(found.Image.Size),
		"pinned":      found.Image.Pinned,
	}})
}

func listImages(ctx context.Context, endpoint string) error {
	images, err := imageService(endpoint)
	if err != nil {
		return err
	}
	all, err := images.ListImages(ctx, nil)
	if err != nil {
		return err
	}
	for _, image := range all {
		fmt.Printf("%v\t%.19s\t%d\n", image.RepoTags, image.Id, image.Size)
	}
	return nil
}

func listContainers(ctx context.Context, endpoint string) error {
	service, err := runtimeService(endpoint)
	if err != nil {
		return err
	}
	all, err := service.ListContainers(ctx, nil)
	if err != nil {
		return err
	}
	for _, c := range all {
		fmt.Printf("%.13s\t%s\t%s\t%s\n", c.Id, c.State, c.Metadata.Name, c.Labels["io.kubernetes.pod.name"])
	}
	return nil
}

func listPods(ctx context.Context, endpoint string) error {
	service, err := runtimeService(endpoint)
	if err != nil {
		return err
	}
	all, err := service.ListPodSandbox(ctx, nil)
	if err != nil {
		return err
	}
	for _, pod := range all {
		fmt.Printf("%.13s\t%s\t%s/%s\n", pod.Id, pod.State, pod.Metadata.Namespace, pod.Metadata.Name)
	}
	return nil
}

func imageService(endpoint string) (cri.ImageManagerService, error) {
	log := klog.Background()
	return remote.NewRemoteImageService(endpoint, callTimeout, nil, &log)
}

func runtimeService(endpoint string) (cri.RuntimeService, error) {
	log := klog.Background()
	return remote.NewRemoteRuntimeService(endpoint, callTimeout, nil, &log)
}
