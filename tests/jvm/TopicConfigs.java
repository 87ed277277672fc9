import java.util.TreeMap;
import org.apache.kafka.storage.internals.log.LogConfig;

/** Prints a line for each topic config of Kafka: name, type, default, allowed values, cluster-wide key, "internal". */
public class TopicConfigs {
    public static void main(String[] arguments) {
        var definitions = LogConfig.configDefCopy();
        new TreeMap<>(LogConfig.configKeys()).forEach((name, key) -> System.out.println(String.join("\t",
            name,
            String.valueOf(key.type),
            String.valueOf(key.defaultValue),
            String.valueOf(key.validator),
            definitions.serverConfigName(name).orElse("-"),
            key.internalConfig ? "internal" : "public")));
    }
}
